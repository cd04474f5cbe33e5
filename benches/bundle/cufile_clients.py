"""Programs that call cuFile, unmodified: each writes, reads back and compares, at odd sizes and offsets.

usage: cufile_clients.py PART FOLDER       PART: torch kvikio fastsafetensors bindings nixl kvikio-bench
Prints lines "ok ..." and "FAIL ...", and which libcufile was used.
"""

import os
import sys
import threading
import time

PART, FOLDER = sys.argv[1], sys.argv[2]
SIZES = [1, 511, 4096, 4097, 65537, 1 << 20, (16 << 20) + 3]
bad = 0


def check(ok, what):
    global bad
    bad += not ok
    print("ok  " if ok else "FAIL", what, flush=True)


def library():
    paths = {line.split()[-1] for line in open("/proc/self/maps") if "libcufile.so" in line}
    print("library:", " ".join(sorted(paths)) or "none", flush=True)


def path(name):
    return os.path.join(FOLDER, name)


def torch_part():
    import torch

    torch.cuda.init()
    for size in SIZES:
        source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
        target = torch.zeros(size, dtype=torch.uint8, device="cuda")
        torch.cuda.gds.gds_register_buffer(source.untyped_storage())
        for offset in (0, 4096, 777):
            torch.cuda.synchronize()
            f = torch.cuda.gds.GdsFile(path("torch"), os.O_CREAT | os.O_RDWR)
            f.save_storage(source.untyped_storage(), offset=offset)
            target.zero_()
            torch.cuda.synchronize()
            f.load_storage(target.untyped_storage(), offset=offset)
            check(torch.equal(source, target), f"torch.cuda.gds {size} bytes at {offset}")
            del f
        torch.cuda.gds.gds_deregister_buffer(source.untyped_storage())
    library()
    size = 2 << 30
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    target = torch.zeros(size, dtype=torch.uint8, device="cuda")
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    f = torch.cuda.gds.GdsFile(path("torch"), os.O_CREAT | os.O_RDWR)
    t = time.time()
    f.save_storage(source.untyped_storage())
    save = size / (time.time() - t) / 1e9
    # Into a file that is there already; and what the kernel takes from one thread that has the bytes in memory.
    agains, plain = [], []
    for _ in range(3):
        t = time.time()
        f.save_storage(source.untyped_storage())
        agains.append(size / (time.time() - t) / 1e9)
    view = memoryview(host.numpy())
    for _ in range(2):
        with open(path("plain"), "wb", buffering=0) as other:
            t = time.time()
            done = 0
            while done < size:
                done += other.write(view[done:done + (16 << 20)])
            plain.append(size / (time.time() - t) / 1e9)
        os.unlink(path("plain"))
    print(f"torch.cuda.gds: save into a new file {save:.1f} GB/s (write(2) of host memory {max(plain):.1f}), "
          f"into one that is in the page cache {sorted(agains)[1]:.1f}", [f"{x:.1f}" for x in agains])
    loads, links = [], []
    for _ in range(5):
        t = time.time()
        f.load_storage(target.untyped_storage())
        loads.append(size / (time.time() - t) / 1e9)
        torch.cuda.synchronize()
        t = time.time()
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        links.append(size / (time.time() - t) / 1e9)
    f.load_storage(target.untyped_storage())
    check(torch.equal(source, target), "torch.cuda.gds 2 GiB")
    load, link = sorted(loads)[2], sorted(links)[2]
    print(f"torch.cuda.gds: load {load:.1f} GB/s, save {save:.1f} GB/s, pinned link {link:.1f} GB/s, "
          f"load/link {load / link:.2f}", [f"{x:.1f}" for x in loads])


def kvikio_part():
    import cupy
    import kvikio
    import kvikio.defaults

    print("compat mode:", kvikio.defaults.get("compat_mode"))
    try:
        import kvikio.cufile_driver as driver
        print("version:", driver.libcufile_version())
    except Exception as error:  # only for the log
        print("version:", error)
    stream = cupy.cuda.Stream(non_blocking=True)
    for size in SIZES:
        source = cupy.random.randint(0, 256, size, dtype=cupy.uint8)
        target = cupy.zeros(size + 100, dtype=cupy.uint8)
        cupy.cuda.runtime.deviceSynchronize()
        for offset in (0, 4096, 777):
            with kvikio.CuFile(path("kvikio"), "w+") as f:
                check(f.write(source, file_offset=offset) == size, f"kvikio write {size} at {offset}")
            with kvikio.CuFile(path("kvikio"), "r") as f:
                n = f.read(target[:size], file_offset=offset)
                cupy.cuda.runtime.deviceSynchronize()
                check(n == size and bool((target[:size] == source).all()), f"kvikio read {size} at {offset}")
                target[:] = 0
                cupy.cuda.runtime.deviceSynchronize()
                n = f.raw_read(target, size=size, file_offset=offset, dev_offset=100)
                same = bool((target[100:] == source).all()) and not target[:100].any()
                check(n == size and same, f"kvikio raw_read {size} at {offset}, device offset 100")
                target[:] = 0
                cupy.cuda.runtime.deviceSynchronize()
                future = f.raw_read_async(target, stream.ptr, size=size, file_offset=offset)
                n = future.check_bytes_done()
                check(n == size and bool((target[:size] == source).all()), f"kvikio async {size} at {offset}")
                past = f.raw_read(target, size=size, file_offset=offset + size - size // 2)
                check(past == size // 2, f"kvikio past the end: {past}")
            with kvikio.CuFile(path("kvikio"), "r+") as f:
                n = f.raw_write_async(source, stream.ptr, size=size, file_offset=offset + 3).check_bytes_done()
                target[:] = 0
                cupy.cuda.runtime.deviceSynchronize()
                f.raw_read(target, size=size, file_offset=offset + 3)
                check(n == size and bool((target[:size] == source).all()), f"kvikio async write {size}")
    # several at once, over kvikio's own threads
    source = cupy.arange(32 << 20, dtype=cupy.uint8)
    parts = [cupy.zeros(32 << 20, dtype=cupy.uint8) for _ in range(4)]
    cupy.cuda.runtime.deviceSynchronize()
    with kvikio.CuFile(path("kvikio"), "w+") as f:
        f.write(source)
        futures = [f.pread(part, task_size=1 << 20) for part in parts]
        check(sum(x.get() for x in futures) == 4 * source.size, "kvikio four reads at once")
        check(all(bool((part == source).all()) for part in parts), "their data")
        t = time.time()
        for _ in range(8):
            f.pread(parts[0], task_size=32 << 20).get()
        print(f"kvikio.pread 32 MiB, one task: {8 * source.size / (time.time() - t) / 1e9:.1f} GB/s")
    library()


def kvikio_bench():
    """kvikio's own POSIX path in the cells of cufile_bench.c: raw_read and raw_write from Python threads."""
    import cupy
    import kvikio

    seconds, name = float(sys.argv[3]), sys.argv[4]
    for op in ("read", "write"):
        whole = (2 << 30) if op == "read" else (512 << 20)
        f = kvikio.CuFile(path("cufile-bench." + op), "r+")
        for size in (4 << 10, 64 << 10, 1 << 20, 16 << 20):
            for threads in (1, 4, 16):
                times, done, stop = [[] for _ in range(threads)], [0] * threads, [False]

                def work(index):
                    cupy.cuda.Device(0).use()
                    buffer = cupy.zeros(size, dtype=cupy.uint8)
                    cupy.cuda.runtime.deviceSynchronize()
                    call = f.raw_read if op == "read" else f.raw_write
                    units = whole // size
                    low, span = units * index // threads, max(1, units // threads)
                    call(buffer, size=size, file_offset=low * size)
                    barrier.wait()
                    k = 0
                    while not stop[0]:
                        a = time.perf_counter()
                        n = call(buffer, size=size, file_offset=(low + k % span) * size)
                        times[index].append(time.perf_counter() - a)
                        done[index] += n
                        k += 1

                barrier = threading.Barrier(threads + 1)
                workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
                for worker in workers:
                    worker.start()
                barrier.wait()
                t, c = time.perf_counter(), time.process_time()
                time.sleep(seconds)
                stop[0] = True
                for worker in workers:
                    worker.join()
                t, c = time.perf_counter() - t, time.process_time() - c
                every = sorted(x for list in times for x in list)
                p50, p99 = every[len(every) // 2] * 1e6, every[len(every) * 99 // 100] * 1e6
                total = sum(done)
                print(f"{name},1,{op},{size},{threads},{total / t / 1e9:.3f},{p50:.1f},{p99:.1f},"
                      f"{c / (total / 2**30):.4f},-", flush=True)


def fastsafetensors_part():
    import torch
    from safetensors.torch import save_file
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    tensors = {f"t{i}": torch.randint(0, 256, (n,), dtype=torch.uint8) for i, n in enumerate(SIZES)}
    tensors["w"] = torch.randn(4096, 8192)
    save_file(tensors, path("model.safetensors"))
    loader = SafeTensorsFileLoader(SingleGroup(), device="cuda:0", nogds=False, debug_log=False)
    loader.add_filenames({0: [path("model.safetensors")]})
    t = time.time()
    buffer = loader.copy_files_to_device()
    span = time.time() - t
    for name, tensor in tensors.items():
        got = buffer.get_tensor(name)
        check(torch.equal(got.cpu(), tensor), f"fastsafetensors {name} {tuple(tensor.shape)}")
    size = os.path.getsize(path("model.safetensors"))
    print(f"fastsafetensors: {size} bytes in {span:.3f} s, {size / span / 1e9:.1f} GB/s")
    library()
    buffer.close()
    loader.close()


def bindings_part():
    import torch
    from cuda.bindings import cufile

    torch.cuda.init()
    cufile.driver_open()
    print("version:", cufile.get_version(), "use count:", cufile.use_count())
    for size in SIZES:
        source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
        target = torch.zeros(size, dtype=torch.uint8, device="cuda")
        fd = os.open(path("bindings"), os.O_CREAT | os.O_RDWR, 0o644)
        descr = cufile.Descr()
        descr.type = cufile.FileHandleType.OPAQUE_FD
        descr.handle.fd = fd
        descr.fs_ops = 0
        handle = cufile.handle_register(descr.ptr)
        torch.cuda.synchronize()
        cufile.buf_register(target.data_ptr(), size, 0)
        n = cufile.write(handle, source.data_ptr(), size, 777, 0)
        m = cufile.read(handle, target.data_ptr(), size, 777, 0)
        check(n == size and m == size and torch.equal(source, target), f"cuda.bindings {size}")
        cufile.buf_deregister(target.data_ptr())
        cufile.handle_deregister(handle)
        os.close(fd)
    library()
    for name in ("get_parameter_size_t", "get_parameter_bool"):
        for value in range(12):
            try:
                getattr(cufile, name)(value)
            except Exception as error:
                check(False, f"{name}({value}): {error}")
    try:
        cufile.driver_close()
        cufile.set_stats_level(1)
        cufile.driver_open()
        cufile.stats_start()
        print("statistics level:", cufile.get_stats_level())
    except Exception as error:
        check(False, f"statistics: {error}")
    cufile.driver_close()


def nixl_part():
    import torch
    from nixl_cu13._api import nixl_agent, nixl_agent_config

    for backend in ("GDS", "GDS_MT"):
        try:
            agent = nixl_agent("beeline-" + backend, nixl_agent_config(backends=[]))
            agent.create_backend(backend)
            for size in (4096, 4097, 1 << 20, (16 << 20) + 3):
                source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
                target = torch.zeros(size, dtype=torch.uint8, device="cuda")
                torch.cuda.synchronize()
                fd = os.open(path("nixl"), os.O_CREAT | os.O_RDWR, 0o644)
                files = agent.register_memory([(0, size, fd, "f")], "FILE")
                for memory, way in ((source, "WRITE"), (target, "READ")):
                    words = [(memory.data_ptr(), size, 0, "m")]
                    registered = agent.register_memory(words, "VRAM")
                    local = agent.get_xfer_descs([(memory.data_ptr(), size, 0)], "VRAM")
                    handle = agent.initialize_xfer(way, local, files.trim(), "beeline-" + backend)
                    state, until = agent.transfer(handle), time.time() + 20
                    while state not in ("DONE", "ERR") and time.time() < until:
                        state = agent.check_xfer_state(handle)
                    agent.release_xfer_handle(handle)
                    agent.deregister_memory(registered)
                    if state != "DONE":
                        check(False, f"NIXL {backend} {way} {size}: {state}")
                check(torch.equal(source, target), f"NIXL {backend} {size}")
                agent.deregister_memory(files)
                os.close(fd)
        except Exception as error:
            check(False, f"NIXL {backend}: {type(error).__name__}: {error}")
    library()


parts = {"torch": torch_part, "kvikio": kvikio_part, "fastsafetensors": fastsafetensors_part,
         "bindings": bindings_part, "nixl": nixl_part, "kvikio-bench": kvikio_bench}
parts[PART]()
print(f"{PART}: {'all ok' if not bad else f'{bad} FAILED'}", file=sys.stderr if PART == "kvikio-bench" else sys.stdout)
sys.exit(bad != 0)
