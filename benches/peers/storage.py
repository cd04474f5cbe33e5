#!/usr/bin/env python3
"""File -> GPU, Beeline beside the loaders people use, in one run on one machine.

    storage.py --bench ./storage --beeline ./beeline [--gib 8] [--cold-gib 2] [--runs 5] [--out DIR]

Two timings: (a) a fresh process with everything included, (b) context, pool and destination ready.
Warm means in the page cache, on ext4 (or what /tmp is) and on tmpfs; cold means a file written for this
one run, synced and dropped from the page cache. Before and after the cold runs stands the raw O_DIRECT
read at depth 32. Every figure is the median of the runs with its spread, and comes with the CPU time of
the whole process in seconds per GB (10^9 bytes). A peer that is not installed is listed as skipped.
Writes storage.json, storage.md and storage.svg into --out.
"""
import argparse, ctypes, importlib, json, mmap, os, resource, statistics, struct, subprocess, sys, time

WARM_PEERS = ["pinned copy", "safetensors.torch", "fastsafetensors", "kvikio", "runai streamer"]


def cpu():
    own, kids = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + kids.ru_utime + kids.ru_stime


def make(path, gib, seed):
    """A safetensors file of `gib` GiB whose whole size is a multiple of 64 MiB."""
    stretch = 64 << 20
    total = gib << 30
    count = 64
    header_len = 1 << 20
    data = total - header_len
    each = data // count // 4096 * 4096
    sizes = [each] * (count - 1) + [data - each * (count - 1)]
    tensors, at = {}, 0
    for i, size in enumerate(sizes):
        tensors[f"layers.{i}.weight"] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(tensors).encode()
    noise = os.urandom(stretch)
    with open(path, "wb", buffering=0) as f:
        block = bytearray(noise)
        block[:8] = struct.pack("<Q", header_len - 8)
        block[8:header_len] = text.ljust(header_len - 8)
        f.write(block)
        for i in range(1, total // stretch):
            noise = struct.pack("<QQ", seed, i) + noise[16:]
            f.write(noise)
        os.fsync(f.fileno())
    return total


def drop(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def warm(path):
    with open(path, "rb", buffering=0) as f:
        block = bytearray(64 << 20)
        while f.readinto(block):
            pass


class Peer:
    """One loader; `ready` makes context and destination, `load` is what is timed."""

    def __init__(self, path):
        import torch

        self.torch, self.path, self.size = torch, path, os.path.getsize(path)
        torch.cuda.init()
        torch.zeros(1, device="cuda")

    def ready(self):
        pass

    def load(self):
        raise NotImplementedError


class PinnedCopy(Peer):
    """The limit of the link: one pinned buffer copied to the device."""

    def ready(self):
        self.size = 1 << 30
        self.host = self.torch.empty(self.size, dtype=self.torch.uint8, pin_memory=True)
        self.host.fill_(1)
        self.device = self.torch.zeros(self.size, dtype=self.torch.uint8, device="cuda")

    def load(self):
        self.device.copy_(self.host, non_blocking=True)
        self.torch.cuda.synchronize()


class SafetensorsTorch(Peer):
    def load(self):
        from safetensors.torch import load_file

        self.out = load_file(self.path, device="cuda:0")
        self.torch.cuda.synchronize()


class FastSafetensors(Peer):
    def ready(self):
        importlib.import_module("fastsafetensors")

    def load(self):
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        loader = SafeTensorsFileLoader(SingleGroup(), self.torch.device("cuda:0"), nogds=True)
        loader.add_filenames({0: [self.path]})
        bufs = loader.copy_files_to_device()
        self.torch.cuda.synchronize()
        bufs.close()
        loader.close()


class Kvikio(Peer):
    threads, task = 16, 4 << 20

    def ready(self):
        import cupy, kvikio, kvikio.defaults

        self.kvikio = kvikio
        kvikio.defaults.set({"compat_mode": kvikio.CompatMode.ON, "num_threads": self.threads, "task_size": self.task})
        self.buffer = cupy.zeros(self.size, dtype=cupy.uint8)

    def load(self):
        with self.kvikio.CuFile(self.path, "r") as f:
            n = f.pread(self.buffer).get()
        assert n == self.size
        self.torch.cuda.synchronize()


class RunaiStreamer(Peer):
    def ready(self):
        importlib.import_module("runai_model_streamer")

    def load(self):
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(self.path)
            self.out = {name: tensor.to("cuda:0", non_blocking=True) for name, tensor in streamer.get_tensors()}
            self.torch.cuda.synchronize()


PEERS = {
    "pinned copy": PinnedCopy,
    "safetensors.torch": SafetensorsTorch,
    "fastsafetensors": FastSafetensors,
    "kvikio": Kvikio,
    "runai streamer": RunaiStreamer,
}


def once(peer):
    begin, used = time.perf_counter(), cpu()
    peer.load()
    seconds = time.perf_counter() - begin
    return peer.size, seconds, cpu() - used


def child(args):
    """(a) and (b) of one peer in a process of its own: prints a JSON line per run."""
    cls = PEERS[args.child]
    if args.child == "kvikio":
        cls.threads, cls.task = args.threads, args.task
    peer = cls(args.file)
    peer.ready()
    for run in range(args.runs):
        if args.cold:
            drop(args.file)
        size, seconds, used = once(peer)
        peer.out = None
        print(json.dumps({"bytes": size, "seconds": seconds, "cpu_seconds": used}), flush=True)


def run_json(command, env=None):
    out = subprocess.run(command, capture_output=True, text=True, env=env, timeout=400)
    lines = [line for line in out.stdout.splitlines() if line.startswith("{")]
    if out.returncode or not lines:
        raise RuntimeError((out.stderr.strip().splitlines() or [f"exit {out.returncode}"])[-1])
    return [json.loads(line) for line in lines]


class Table:
    def __init__(self):
        self.rows, self.skipped = [], []

    def add(self, case, name, runs, note=""):
        speed = sorted(r["bytes"] / r["seconds"] / 1e9 for r in runs)
        cost = statistics.median(r["cpu_seconds"] / r["bytes"] * 1e9 for r in runs)
        row = {"case": case, "name": name, "median": statistics.median(speed), "min": speed[0], "max": speed[-1],
               "cpu": cost, "note": note or runs[0].get("routes", "")}
        self.rows.append(row)
        print(f"{case:<12} {name:<28} {row['median']:7.2f} GB/s ({row['min']:.2f}-{row['max']:.2f}) "
              f"{cost:6.3f} CPU-s/GB  {row['note']}", flush=True)
        return row["median"]

    def guard(self, case, name, body):
        try:
            return self.add(case, name, *body())
        except Exception as error:  # A missing peer must not end the comparison.
            self.skipped.append({"case": case, "name": name, "why": str(error)[:200]})
            print(f"{case:<12} {name:<28} skipped: {str(error)[:160]}", flush=True)
            return None


def compare(args):
    table = Table()
    me = [sys.executable, os.path.abspath(__file__)]
    bench = lambda path, cache, runs, *more: run_json(
        [args.bench, "--file", path, "--to", args.to, "--once", cache, "--runs", str(runs), *more])
    peer = lambda name, path, runs, *more: run_json(me + ["--child", name, "--file", path, "--runs", str(runs), *more])
    if "fresh" in args.only:
        fresh(args, table, me)
    for case, folder in [("warm ext4", args.disk), ("warm tmpfs", args.shm)]:
        if case.split()[1] not in args.only:
            continue
        path = os.path.join(folder, "beeline-peers.safetensors")
        make(path, args.gib, 1)
        warm(path)
        table.guard(case, "pinned copy", lambda: (peer("pinned copy", path, args.runs),))
        table.guard(case, "beeline", lambda: (bench(path, "warm", args.runs),))
        best = None
        for threads in args.kvikio_threads:
            for task in args.kvikio_tasks:
                name = f"kvikio {threads}x{task >> 20}M"
                got = table.guard(case, name, lambda: (peer("kvikio", path, args.runs, "--threads", str(threads), "--task", str(task)),))
                best = max(filter(None, [best, got]), default=None)
        table.guard(case, "beeline, again", lambda: (bench(path, "warm", args.runs),))
        table.guard(case, "beeline mapped", lambda: (bench(path, "warm", args.runs, "--route", "mapped-page-cache"),))
        if args.mapped and case == "warm ext4":
            table.guard(case, "bare registered loop", lambda: mapped(args, path))
        memory(args, path)
        for name in args.peers:
            table.guard(case, name, lambda: (peer(name, path, min(args.runs, 3)),))
        if best:
            print(f"{case:<12} kvikio at its best: {best:.2f} GB/s", flush=True)
        os.unlink(path)
    if "cold" in args.only:
        cold(args, table, bench, peer)
    return table


def mapped(args, path):
    """The bare loop that registers page cache ahead of its copies; its best chunk and depth."""
    best = max((run_json([args.mapped, path, str(chunk), str(depth), str(args.runs)])
                for chunk in (16, 64, 256) for depth in (2, 4)),
               key=lambda runs: statistics.median(r["bytes"] / r["seconds"] for r in runs))
    return best, best[0]["note"]


def memory(args, path):
    """What a load takes beyond the data, and what it leaves behind."""
    try:
        got = run_json([args.bench, "--file", path, "--to", args.to, "--memory"])[0]
        print("memory       " + ", ".join(f"{k.replace('_', ' ')} {v / 2**20:.1f} MiB" for k, v in got.items()), flush=True)
    except Exception as error:
        print(f"memory       skipped: {str(error)[:160]}", flush=True)


def cold(args, table, bench, peer):
    path = os.path.join(args.disk, "beeline-cold.safetensors")

    def new_file_each(body):
        runs = []
        for i in range(args.cold_runs):
            make(path, args.cold_gib, 100 + i)
            drop(path)
            runs += body()
            os.unlink(path)
        return (runs,)

    raw = lambda: run_json([args.bench, "--file", path, "--to", args.to, "--raw", "--runs", "1"])
    table.guard("cold ext4", "raw O_DIRECT depth 32", lambda: new_file_each(raw))
    table.guard("cold ext4", "beeline", lambda: new_file_each(lambda: bench(path, "cold", 1)))
    for name in ["kvikio", *args.peers]:
        table.guard("cold ext4", name, lambda: new_file_each(lambda: peer(name, path, 1, "--cold")))
    table.guard("cold ext4", "raw O_DIRECT depth 32, again", lambda: new_file_each(raw))


def fresh(args, table, me):
    """(a): process start to last byte of a 1 GiB file in the page cache."""
    path = os.path.join(args.disk, "beeline-fresh.safetensors")
    size = make(path, 1, 7)
    warm(path)

    def timed(command):
        runs = []
        for _ in range(min(args.runs, 3)):
            used, begin = cpu(), time.perf_counter()
            out = subprocess.run(command, capture_output=True, text=True, timeout=300)
            seconds = time.perf_counter() - begin
            if out.returncode:
                raise RuntimeError(out.stderr[-200:])
            runs.append({"bytes": size, "seconds": seconds, "cpu_seconds": cpu() - used})
        seconds = statistics.median(r["seconds"] for r in runs)
        return runs, f"{seconds:.3f} s from start to end"

    table.guard("fresh 1 GiB", "context creation alone", lambda: timed([args.bench, "--to", args.to, "--context-only"]))
    table.guard("fresh 1 GiB", "beeline load", lambda: timed([args.beeline, "load", path, "--to", args.to]))
    for name in args.fresh_peers:
        table.guard("fresh 1 GiB", name, lambda: timed(me + ["--child", name, "--file", path, "--runs", "1"]))
    os.unlink(path)


def write(table, args):
    os.makedirs(args.out, exist_ok=True)
    with open(os.path.join(args.out, "storage.json"), "w") as f:
        json.dump({"rows": table.rows, "skipped": table.skipped}, f, indent=1)
    with open(os.path.join(args.out, "storage.md"), "w") as f:
        f.write("| case | loader | GB/s | spread | CPU-s/GB | note |\n|---|---|---|---|---|---|\n")
        for r in table.rows:
            f.write(f"| {r['case']} | {r['name']} | {r['median']:.2f} | {r['min']:.2f}-{r['max']:.2f} | {r['cpu']:.3f} | {r['note']} |\n")
        for s in table.skipped:
            f.write(f"| {s['case']} | {s['name']} | skipped | | | {s['why']} |\n")
    with open(os.path.join(args.out, "storage.svg"), "w") as f:
        f.write(svg(table.rows))


def svg(rows):
    """Bars with their spread, one group a case."""
    from html import escape

    top = max((r["max"] for r in rows), default=1)
    height, y, out = 22 * len(rows) + 60, 40, []
    for r in rows:
        width, low, high = (r[k] / top * 480 for k in ("median", "min", "max"))
        colour = "#c77700" if r["name"].startswith("beeline") else "#5b7c99"
        out.append(f'<text x="8" y="{y + 12}">{escape(r["case"])}: {escape(r["name"])}</text>'
                   f'<rect x="260" y="{y}" width="{width:.1f}" height="14" fill="{colour}"/>'
                   f'<path d="M{260 + low:.1f} {y + 7}H{260 + high:.1f}" stroke="#222"/>'
                   f'<text x="{268 + max(width, high):.1f}" y="{y + 12}">{r["median"]:.1f}</text>')
        y += 22
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="820" height="{height}" font-family="sans-serif" font-size="12">'
            f'<rect width="100%" height="100%" fill="#fff"/><text x="8" y="22" font-size="15">File to GPU, GB/s (median, spread)</text>{"".join(out)}</svg>')


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bench", default="./storage")
    p.add_argument("--beeline", default="./beeline")
    p.add_argument("--to", default="cuda:0")
    p.add_argument("--gib", type=int, default=8)
    p.add_argument("--cold-gib", type=int, default=2)
    p.add_argument("--runs", type=int, default=5)
    p.add_argument("--cold-runs", type=int, default=5)
    p.add_argument("--disk", default="/tmp")
    p.add_argument("--shm", default="/dev/shm")
    p.add_argument("--out", default=".")
    p.add_argument("--kvikio-threads", type=lambda s: [int(x) for x in s.split(",")], default=[8, 16, 32])
    p.add_argument("--kvikio-tasks", type=lambda s: [int(x) << 20 for x in s.split(",")], default=[4 << 20, 16 << 20])
    names = lambda s: [name for name in s.split(",") if name]
    others = ["safetensors.torch", "fastsafetensors", "runai streamer"]
    p.add_argument("--peers", type=names, default=others, help="loaders beside kvikio")
    p.add_argument("--fresh-peers", type=names, default=["kvikio", *others], help="loaders timed from process start")
    p.add_argument("--only", type=lambda s: s.split(","), default=["fresh", "ext4", "tmpfs", "cold"])
    p.add_argument("--mapped", help="the bare registered loop: a program built from mapped.cu beside this")
    p.add_argument("--child")
    p.add_argument("--file")
    p.add_argument("--cold", action="store_true")
    p.add_argument("--threads", type=int, default=16)
    p.add_argument("--task", type=int, default=4 << 20)
    args = p.parse_args()
    if args.child:
        return child(args)
    table = compare(args)
    write(table, args)


if __name__ == "__main__":
    main()
