"""Real programs over whichever libnccl.so.2 is loaded: torch.distributed, cupy, JAX and ctypes, every result compared.

usage: nccl_clients.py FOLDER [PART..]      FOLDER has libnccl.so.2; parts: torch training faults torchrun cupy ctypes jax
Each sub-test has a time limit: what hangs is killed, and the rest goes on in new processes. One line a sub-test, "ok"
or "FAILED"; what failed is told again at the end. BUDGET (150) seconds are the limit of everything.
"""

import faulthandler
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time

BEGAN = time.monotonic()
BUDGET = float(os.environ.get("BUDGET", "150"))
# "cpu" checks this file itself where there is no GPU: gloo stands in for NCCL.
DEVICE = os.environ.get("CLIENTS_DEVICE", "cuda")


# ---------------------------------------------------------------- the parent

class Team:
    """Processes of one part, one a rank; each says what it does on its standard output, and goes on when told."""

    def __init__(self, run, part, world, start=0, stock=False, env=None):
        self.run, self.part, self.world, self.start, self.stock = run, part, world, start, stock
        self.lines = queue.Queue()
        # A rank may be ahead: what it said is kept until it is asked for.
        self.waiting = [[] for _ in range(world)]
        self.values = {}
        Team.count = getattr(Team, "count", 0) + 1
        self.name = f"{part}{'-stock' if stock else ''}-{Team.count}"
        self.processes, self.logs = [], []
        for rank in range(world):
            log = os.path.join(run.out, f"{self.name}-{rank}.log")
            child = dict(os.environ, **(env or {}))
            if not stock and run.ours:
                child["LD_PRELOAD"] = run.ours
            child["CLIENTS_STORE"] = os.path.join(run.out, f"{self.name}.store")
            command = [sys.executable, "-u", os.path.abspath(__file__), "--worker", part, str(rank), str(world), str(start)]
            process = subprocess.Popen(command, env=child, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       stderr=open(log, "w"), text=True, start_new_session=True)
            self.processes.append(process)
            self.logs.append(log)
            threading.Thread(target=self.read, args=(rank, process), daemon=True).start()

    def read(self, rank, process):
        for line in process.stdout:
            self.lines.put((rank, line.rstrip("\n")))
        self.lines.put((rank, "@gone"))

    def say(self, word):
        for process in self.processes:
            try:
                process.stdin.write(word + "\n")
                process.stdin.flush()
            except OSError:
                pass

    def gather(self, limit):
        """One message of every rank, or None for those who said nothing in time; "@gone" from one who ended."""
        end = time.monotonic() + max(0.1, min(limit, self.run.left()))
        while not all(self.waiting):
            try:
                rank, line = self.lines.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                break
            if line.startswith("@value "):
                key, value = json.loads(line[7:])
                self.values[f"{key}.{rank}"] = value
            elif line.startswith("@"):
                self.waiting[rank].append(line)
            if line == "@gone":
                # The others may never answer any more.
                end = min(end, time.monotonic() + 3)
        # That one has ended stays known.
        return [said and (said[0] if said[0] == "@gone" else said.pop(0)) or None for said in self.waiting]

    def tail(self, rank, lines=6):
        noise = ("frame #", "Warning", "warnings.warn", "<unknown function>", "[W1", "return func", "Exception raised from")
        try:
            text = [line.rstrip() for line in open(self.logs[rank], errors="replace")]
        except OSError:
            return ""
        text = [line for line in text if line.strip() and not any(word in line for word in noise)]
        return " | ".join(line.strip()[:300] for line in text[-lines:])

    def stacks(self):
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)

    def end(self, limit=0.0):
        until = time.monotonic() + limit
        for process in self.processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except OSError:
                    pass
                process.wait(10)


class Run:
    def __init__(self, folder):
        library = os.path.abspath(os.path.join(folder, "libnccl.so.2"))
        self.ours = library if os.path.exists(library) and DEVICE == "cuda" else None
        self.out = os.path.abspath(os.environ.get("OUT", os.path.join(folder, "clients-logs")))
        os.makedirs(self.out, exist_ok=True)
        self.good, self.bad = 0, []
        self.spares = {}

    def left(self):
        return BUDGET - (time.monotonic() - BEGAN)

    def note(self, ok, name, detail=""):
        line = f"{name}: {detail}" if detail else name
        if ok:
            self.good += 1
        else:
            self.bad.append(line)
        print(f"{'ok    ' if ok else 'FAILED'} [{time.monotonic() - BEGAN:5.1f} s] {line}", flush=True)

    def spare(self, part, world, **more):
        """Processes that have loaded what they need by the time they are wanted."""
        self.spares.setdefault(part + str(more.get("stock", "")), []).append(Team(self, part, world, **more))

    def team(self, part, world, start=0, **more):
        waiting = self.spares.get(part + str(more.get("stock", "")), [])
        team = waiting.pop(0) if waiting else Team(self, part, world, start=start, **more)
        answers = team.gather(60)
        if any(answer != "@ready" for answer in answers):
            self.note(False, f"{team.name} start", f"{answers}; {team.tail(0)}")
            team.end()
            return None
        team.say(f"go {start}")
        return team

    def tests(self, part, world, restarts=3, **more):
        """Runs all tests of a part; what hangs or breaks is killed, and new processes go on behind it."""
        start, values = 0, {}
        for _ in range(restarts + 1):
            if self.left() < 5:
                self.note(False, part, "no time left")
                return values
            team = self.team(part, world, start, **more)
            if team is None:
                return values
            done = self.series(team)
            values.update(team.values)
            team.end(0 if done is not None else 5)
            if done is None:
                return values
            start = done
        self.note(False, part, f"gave up after {restarts} restarts, at test {start}")
        return values

    def series(self, team):
        """None once all tests ran, or the number of the first that did not."""
        index = team.start
        while True:
            begun = team.gather(30)
            if all(answer == "@done" for answer in begun):
                return None
            first = next((answer for answer in begun if answer and answer.startswith("@begin ")), None)
            if first is None:
                self.note(False, f"{team.name} test {index}", f"{begun}; {team.tail(0)}")
                return index + 1
            _, number, limit, name = first.split(" ", 3)
            index = int(number)
            answers = team.gather(float(limit))
            if all(answer and answer.startswith("@ok ") for answer in answers):
                self.note(True, f"{team.part} {name}", answers[0][4:])
                team.say("next")
                continue
            team.stacks()
            told = "; ".join(f"rank {rank}: {self.fate(team, rank, answer)}" for rank, answer in enumerate(answers))
            self.note(False, f"{team.part} {name}", told)
            return index + 1

    def fate(self, team, rank, answer):
        if answer is None:
            return f"hung ({team.tail(rank, 4)})"
        if answer == "@gone":
            return f"ended with {team.processes[rank].poll()} ({team.tail(rank, 5)})"
        return answer[1:]


def faults(run):
    """What goes wrong, each in processes of its own; rank 0 says what it saw, or ends as PyTorch's watchdog does."""
    for name, (env, ending, words) in FAULTS.items():
        if run.left() < 12:
            run.note(False, f"faults {name}", "no time left")
            continue
        team = run.team(f"fault-{name}", 2, env=env)
        if team is None:
            continue
        begun = team.gather(30)
        answer = team.gather(35)[0] if ending == "told" and begun[0] != "@gone" else begun[0]
        if ending == "told":
            ok = bool(answer and answer.startswith("@ok ")) and all(word in answer for word in words)
            run.note(ok, f"faults {name}", run.fate(team, 0, answer)[:600])
        else:
            # What it says counts; PyTorch may take its time to end the process after that.
            end, code, log = time.monotonic() + min(30, max(1, run.left())), None, ""
            while time.monotonic() < end and code is None:
                code = team.processes[0].poll()
                log = open(team.logs[0], errors="replace").read()
                if all(word in log for word in words):
                    end = min(end, time.monotonic() + 8)
                time.sleep(0.1)
            said = [line.strip() for line in log.splitlines() if words[0] in line]
            ok = code != 0 and all(word in log for word in words)
            run.note(ok, f"faults {name}", f"exit {code}: {said[0][-400:] if said else team.tail(0)}")
        team.end()


def training(run):
    """The same training over both libraries: the losses have the same bits."""
    ours = run.tests("training", 2, restarts=0)
    stock = run.tests("training", 2, restarts=0, stock=True) if run.ours else {}
    for key, value in sorted(ours.items()):
        if key.startswith(("seconds", "library")):
            print(f"       {key}: {value}", flush=True)
        if key.startswith(("seconds", "library")) or not run.ours:
            continue
        run.note(stock.get(key) == value, f"training {key} as with NCCL",
                 f"{len(value)} values, last {value[-1]}" if stock.get(key) == value else f"ours {value}, NCCL {stock.get(key)}")
    for key, value in sorted(stock.items()):
        if key.startswith(("seconds", "library")):
            print(f"       NCCL's {key}: {value}", flush=True)


def torchrun(run):
    env = dict(os.environ)
    if run.ours:
        env["LD_PRELOAD"] = run.ours
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--master-addr=127.0.0.1",
               "--master-port=29631", os.path.abspath(__file__), "--torchrun"]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=min(45, max(5, run.left())))
        text = done.stdout + done.stderr
        ok = done.returncode == 0 and text.count("torchrun rank") == 2
        told = [line for line in text.splitlines() if "torchrun rank" in line or "rror" in line] or text.splitlines()[-3:]
        run.note(ok, "torchrun", f"exit {done.returncode}: " + " | ".join(told)[-500:])
    except subprocess.TimeoutExpired:
        run.note(False, "torchrun", "hung")


def main():
    run = Run(sys.argv[1] if len(sys.argv) > 1 else ".")
    parts = sys.argv[2:] or ["torch", "training", "faults", "torchrun", "cupy", "ctypes", "jax"]
    print(f"== clients of libnccl.so.2: {run.ours or 'the one of the machine'}; logs in {run.out}", flush=True)
    # Loading takes these programs longest, so they begin at once, and wait.
    if "torch" in parts:
        run.spare("torch", 2)
        run.spare("torch", 2)
    if "training" in parts:
        run.spare("training", 2)
        if run.ours:
            run.spare("training", 2, stock=True)
    for part in parts:
        print(f"-- {part}", flush=True)
        if part == "training" and "faults" in parts:
            for name, (env, _, _) in FAULTS.items():
                run.spare(f"fault-{name}", 2, env=env)
        if part == "faults" and "cupy" in parts:
            for one, world in (("cupy", 2), ("cupy-one", 1)):
                run.spare(one, world)
        try:
            if part == "torch":
                print(f"       {run.tests('torch', 2).get('library.0')}", flush=True)
            elif part == "cupy":
                for one, world in (("cupy", 2), ("cupy-one", 1)):
                    print(f"       {run.tests(one, world, restarts=1).get('library.0')}", flush=True)
            elif part in ("ctypes", "jax"):
                print(f"       {run.tests(part, 1, restarts=1).get('library.0')}", flush=True)
            else:
                {"training": training, "faults": faults, "torchrun": torchrun}[part](run)
        except Exception as error:  # one part does not stop the others
            run.note(False, part, repr(error))
    for teams in run.spares.values():
        for team in teams:
            team.end()
    print(f"\n== {run.good} ok, {len(run.bad)} FAILED in {time.monotonic() - BEGAN:.0f} s", flush=True)
    for line in run.bad:
        print(f"FAILED {line[:700]}", flush=True)
    print("ALL PASSED" if not run.bad else "NOT PASSED", flush=True)
    return 1 if run.bad else 0


# ---------------------------------------------------------------- the workers

def value(key, what):
    print("@value " + json.dumps([key, what]), flush=True)


def library():
    try:
        lines = open("/proc/self/maps").read().splitlines()
    except OSError:
        lines = []
    import ctypes

    # Where a program's calls go: the first in the scope of all libraries. Another may be mapped, and unused.
    try:
        address = ctypes.cast(ctypes.CDLL(None).ncclAllReduce, ctypes.c_void_p).value
    except AttributeError:
        address = 0
    ranges = [([int(end, 16) for end in line.split()[0].split("-")], line.split()[-1]) for line in lines]
    used = [path for (start, end), path in ranges if start <= address < end]
    mapped = sorted({path for _, path in ranges if "libnccl" in path} - set(used))
    value("library", f"calls go to {used}, mapped besides: {mapped}")


def expect(ok, what):
    if not ok:
        raise AssertionError(what)


def worker(part, rank, world):
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    setup, tests = PARTS[part]
    state = setup(rank, world, "load")
    print("@ready", flush=True)
    word = sys.stdin.readline().split()
    if not word or word[0] != "go":
        return
    start = int(word[1])
    state = setup(rank, world, state)
    for number, (name, limit, test) in enumerate(tests):
        if number < start:
            continue
        print(f"@begin {number} {limit} {name}", flush=True)
        try:
            detail = test(*state)
            print(f"@ok {detail or ''}", flush=True)
        except BaseException as error:
            print(f"@bad {type(error).__name__}: {' '.join(str(error).split())[:900]}", flush=True)
        if not sys.stdin.readline():
            return
    library()
    print("@done", flush=True)
    setup(rank, world, None)


# ---------------------------------------------------------------- torch.distributed

def torch_setup(rank, world, state):
    import torch
    import torch.distributed as dist

    if state == "load":
        return "loaded"
    if state is None:
        dist.destroy_process_group()
        return None
    return torch_group(torch, dist, rank, world)


def torch_group(torch, dist, rank, world, timeout=60, bind=True):
    import datetime

    device = torch.device("cuda", rank) if DEVICE == "cuda" else torch.device("cpu")
    if DEVICE == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", init_method=f"file://{os.environ['CLIENTS_STORE']}",
                            rank=rank, world_size=world, timeout=datetime.timedelta(seconds=timeout),
                            device_id=device if bind and DEVICE == "cuda" else None)
    return torch, dist, rank, world, device


def ramp(torch, n, rank, device, top=5, step=0):
    return (torch.arange(n, device=device) * 7 + rank * 3 + step) % top + 1


def same(torch, got, want):
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    if got.element_size() == 1 and got.dtype.is_floating_point:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    return torch.equal(got, want)


def as_type(x, dtype):
    return x.float().to(dtype) if dtype.itemsize == 1 and dtype.is_floating_point else x.to(dtype)


def t_all_reduce(torch, dist, rank, world, device):
    types = "int8 uint8 int32 int64 float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2".split()
    if DEVICE != "cuda":
        types = types[:5] + types[6:8]
    cases, refused = 0, []
    for name in types:
        dtype = getattr(torch, name)
        ops = ["SUM", "PRODUCT", "MIN", "MAX", "AVG", "PREMUL_SUM"] if DEVICE == "cuda" else ["SUM", "PRODUCT", "MIN", "MAX"]
        if name == "float8_e5m2" or name == "float8_e4m3fn":
            top = 2
        else:
            top = 5
        for op in ops:
            if op == "PREMUL_SUM":
                # Of bfloat16 PyTorch 2.11 passes the low half of a 32-bit factor: 0, with any library.
                if name not in ("float16", "float32", "float64"):
                    continue
                try:
                    reduce = dist._make_nccl_premul_sum(0.5)
                    probe = torch.ones(1, dtype=dtype, device=device)
                    dist.all_reduce(probe, reduce)
                except (RuntimeError, ValueError) as error:
                    refused.append(f"{name} {op}: {str(error).splitlines()[0][:60]}")
                    continue
            else:
                reduce = getattr(dist.ReduceOp, op)
            for n in (1, 7, 1003, 1000003):
                for shift in (0, 3):
                    inputs = [ramp(torch, n, r, device, top) for r in range(world)]
                    room = as_type(torch.zeros(n + 8, device=device), dtype)
                    x = room[shift:shift + n]
                    x.copy_(as_type(inputs[rank], dtype))
                    dist.all_reduce(x, reduce)
                    stack = torch.stack(inputs)
                    want = {"SUM": lambda: stack.sum(0), "PRODUCT": lambda: stack.prod(0), "MIN": lambda: stack.amin(0),
                            "MAX": lambda: stack.amax(0), "PREMUL_SUM": lambda: stack.double().sum(0) * 0.5,
                            "AVG": lambda: stack.sum(0).double() / world if dtype.is_floating_point
                            else stack.sum(0) // world}[op]()
                    expect(same(torch, x, as_type(want, dtype)), f"{name} {op} {n} at {shift}: {x[:4]} not {want[:4]}")
                    expect(not bool(room[shift + n:].float().any()), f"{name} {op} {n}: wrote beyond the end")
                    cases += 1
    flags = (torch.arange(1003, device=device) + rank) % 3 == 0
    both = [(torch.arange(1003, device=device) + r) % 3 == 0 for r in range(2)]
    for op, want in (("SUM", both[0] | both[1]), ("MAX", both[0] | both[1]), ("MIN", both[0] & both[1]),
                     ("PRODUCT", both[0] & both[1])) if DEVICE == "cuda" else ():
        x = flags.clone()
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        expect(torch.equal(x, want), f"bool {op}")
        cases += 1
    return f"{cases} cases" + (f"; refused by torch: {refused}" if refused else "")


def t_large(torch, dist, rank, world, device):
    if DEVICE != "cuda":
        return "not here"
    n = (1 << 30) // 4 + 5
    x = ramp(torch, n, rank, device).float()
    dist.all_reduce(x)
    want = sum(ramp(torch, n, r, device) for r in range(world)).float()
    expect(torch.equal(x, want), "all_reduce of 1 GiB")
    del x, want
    n = (1 << 32) + 77
    x = torch.full((n,), rank + 1, dtype=torch.uint8, device=device)
    x[-1] = 40 + rank
    dist.broadcast(x, 1)
    expect(int(x[-1]) == 41 and bool((x[:-1] == 2).all()), "broadcast of 2^32 + 77 bytes")
    return "all_reduce of 1 GiB, broadcast of more than 4 GiB"


def t_gathers(torch, dist, rank, world, device):
    cases = 0
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64):
        for n in (1, 5, 1001, 300001):
            mine = ramp(torch, n, rank, device).to(dtype)
            want = [ramp(torch, n, r, device).to(dtype) for r in range(world)]
            out = torch.zeros(n * world, dtype=dtype, device=device)
            dist.all_gather_into_tensor(out, mine)
            expect(torch.equal(out, torch.cat(want)), f"all_gather_into_tensor {dtype} {n}")
            listed = [torch.zeros_like(mine) for _ in range(world)]
            dist.all_gather(listed, mine)
            expect(all(map(torch.equal, listed, want)), f"all_gather {dtype} {n}")
            if DEVICE == "cuda":
                uneven = [torch.zeros(n + r, dtype=dtype, device=device) for r in range(world)]
                dist.all_gather(uneven, ramp(torch, n + rank, rank, device).to(dtype))
                expect(all(torch.equal(u, ramp(torch, n + r, r, device).to(dtype)) for r, u in enumerate(uneven)), "uneven")
            cases += 3
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * (100 + rank)})
    expect([o["rank"] for o in objects] == list(range(world)), "all_gather_object")
    return f"{cases + 1} cases"


def t_reduce_scatter(torch, dist, rank, world, device):
    if DEVICE != "cuda":
        return "not here"
    cases = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32):
        for n in (1, 5, 1001, 300001):
            for op in ("SUM", "AVG", "MAX"):
                full = [ramp(torch, n * world, r, device) for r in range(world)]
                part = torch.stack(full)[:, rank * n:(rank + 1) * n]
                total = part.sum(0)
                want = {"SUM": total, "MAX": part.amax(0),
                        "AVG": total.double() / world if dtype.is_floating_point else total // world}[op].to(dtype)
                out = torch.zeros(n, dtype=dtype, device=device)
                dist.reduce_scatter_tensor(out, full[rank].to(dtype), getattr(dist.ReduceOp, op))
                expect(torch.equal(out, want), f"reduce_scatter_tensor {dtype} {n} {op}")
                out.zero_()
                dist.reduce_scatter(out, list(full[rank].to(dtype).chunk(world)), getattr(dist.ReduceOp, op))
                expect(torch.equal(out, want), f"reduce_scatter {dtype} {n} {op}")
                cases += 2
    return f"{cases} cases"


def t_all_to_all(torch, dist, rank, world, device):
    cases = 0
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for n in (1, 777, 200003):
            mine = ramp(torch, n * world, rank, device, 100).to(dtype)
            out = torch.zeros_like(mine)
            dist.all_to_all_single(out, mine)
            want = torch.cat([ramp(torch, n * world, r, device, 100).to(dtype)[rank * n:(rank + 1) * n] for r in range(world)])
            expect(torch.equal(out, want), f"all_to_all_single {dtype} {n}")
            # Rank r sends r * 3 + p elements to rank p, among them none at all.
            sends = [0 if (rank, p) == (0, 0) else n + rank * 3 + p for p in range(world)]
            receives = [0 if (r, rank) == (0, 0) else n + r * 3 + rank for r in range(world)]
            mine = ramp(torch, sum(sends), rank, device, 100).to(dtype)
            out = torch.zeros(sum(receives), dtype=dtype, device=device)
            dist.all_to_all_single(out, mine, receives, sends)
            parts = []
            for r in range(world):
                theirs = [0 if (r, p) == (0, 0) else n + r * 3 + p for p in range(world)]
                at = sum(theirs[:rank])
                parts.append(ramp(torch, sum(theirs), r, device, 100).to(dtype)[at:at + theirs[rank]])
            expect(torch.equal(out, torch.cat(parts)), f"uneven {dtype} {n}")
            if DEVICE == "cuda":
                listed = [torch.zeros(c, dtype=dtype, device=device) for c in receives]
                dist.all_to_all(listed, list(mine.split(sends)))
                expect(all(map(torch.equal, listed, parts)), f"all_to_all {dtype} {n}")
            cases += 3
    return f"{cases} cases"


def t_rooted(torch, dist, rank, world, device):
    cases = 0
    for dtype in (torch.float32, torch.bfloat16, torch.int8) if DEVICE == "cuda" else (torch.float32,):
        for n in (1, 1001, 300001):
            for root in range(world):
                x = ramp(torch, n, rank, device).to(dtype)
                dist.broadcast(x, root)
                expect(torch.equal(x, ramp(torch, n, root, device).to(dtype)), f"broadcast {n} from {root}")
                x = ramp(torch, n, rank, device).to(dtype)
                dist.reduce(x, root)
                want = sum(ramp(torch, n, r, device) for r in range(world)).to(dtype)
                expect(rank != root or torch.equal(x, want), f"reduce {n} to {root}")
                mine = ramp(torch, n, rank, device).to(dtype)
                listed = [torch.zeros_like(mine) for _ in range(world)] if rank == root else None
                dist.gather(mine, listed, root)
                expect(rank != root or all(torch.equal(g, ramp(torch, n, r, device).to(dtype)) for r, g in enumerate(listed)),
                       f"gather {n} to {root}")
                out = torch.zeros_like(mine)
                parts = [ramp(torch, n, 10 + r, device).to(dtype) for r in range(world)]
                dist.scatter(out, parts if rank == root else None, root)
                expect(torch.equal(out, parts[rank]), f"scatter {n} from {root}")
                cases += 4
    return f"{cases} cases"


def t_send_recv(torch, dist, rank, world, device):
    other, cases = 1 - rank, 0
    for n in (1, 1003, 5000001):
        for dtype in (torch.float32, torch.uint8):
            x = ramp(torch, n, rank, device, 200).to(dtype)
            got = torch.zeros_like(x)
            if rank == 0:
                dist.send(x, 1)
                dist.recv(got, 1)
            else:
                dist.recv(got, 0)
                dist.send(x, 0)
            expect(torch.equal(got, ramp(torch, n, other, device, 200).to(dtype)), f"send, recv {n}")
            cases += 2
    return f"{cases} cases"


def t_batches(torch, dist, rank, world, device):
    other, cases = 1 - rank, 0
    for sizes in ([1000], [1, 70001, 3, 2000003], list(range(1, 60, 7))):
        out = [ramp(torch, n + rank, rank, device, 100, i).float() for i, n in enumerate(sizes)]
        back = [torch.zeros(n + other, device=device) for n in sizes]
        ops = []
        for i in range(len(sizes)):
            ops.append(dist.P2POp(dist.isend, out[i], other))
            ops.append(dist.P2POp(dist.irecv, back[i], other))
        if rank == 1:
            ops = ops[1::2] + ops[0::2]  # in another order than the peer's, pairs apart
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for i, n in enumerate(sizes):
            expect(torch.equal(back[i], ramp(torch, n + other, other, device, 100, i).float()), f"batch {sizes} message {i}")
            cases += 1
    works = [dist.isend(torch.full((5,), 1.0 + rank, device=device), 1)] if rank == 0 else []
    got = torch.zeros(5, device=device)
    works += [dist.irecv(got, 0)] if rank == 1 else []
    [work.wait() for work in works]
    expect(rank == 0 or bool((got == 1).all()), "isend, irecv")
    return f"{cases + 1} messages"


def t_barriers(torch, dist, rank, world, device):
    for _ in range(20):
        dist.barrier()
    if rank == 0:
        time.sleep(0.5)
    t = time.monotonic()
    dist.barrier()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    waited = time.monotonic() - t
    expect(rank == 0 or waited > 0.3, f"rank 1 waited {waited:.3f} s for a rank that was 0.5 s late")
    return "21 barriers, the last with a late rank"


def t_coalesced(torch, dist, rank, world, device):
    if DEVICE != "cuda":
        return "not here"
    from torch.distributed.distributed_c10d import _coalescing_manager as together

    xs = [ramp(torch, n, rank, device).float() for n in (1, 1003, 65536, 300001)]
    with together(device=device, async_ops=True) as work:
        for x in xs:
            dist.all_reduce(x)
    work.wait()
    expect(all(torch.equal(x, sum(ramp(torch, len(x), r, device) for r in range(world)).float()) for x in xs), "all_reduce")
    sizes = (3, 1003, 65537)
    outs = [torch.zeros(n * world, device=device) for n in sizes]
    with together(device=device, async_ops=True) as work:
        for out, n in zip(outs, sizes):
            dist.all_gather_into_tensor(out, ramp(torch, n, rank, device).float())
    work.wait()
    for out, n in zip(outs, sizes):
        expect(torch.equal(out, torch.cat([ramp(torch, n, r, device) for r in range(world)]).float()), f"all_gather {n}")
    outs = [torch.zeros(n, device=device) for n in sizes]
    with together(device=device, async_ops=True) as work:
        for out, n in zip(outs, sizes):
            dist.reduce_scatter_tensor(out, ramp(torch, n * world, rank, device).float())
    work.wait()
    for out, n in zip(outs, sizes):
        want = sum(ramp(torch, n * world, r, device) for r in range(world))[rank * n:(rank + 1) * n].float()
        expect(torch.equal(out, want), f"reduce_scatter {n}")
    return "all_reduce x 4, all_gather x 3, reduce_scatter x 3"


def t_groups(torch, dist, rank, world, device):
    both, single = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(world)][rank]
    x = torch.full((1001,), 1.0 + rank, device=device)
    dist.all_reduce(x, group=both)
    expect(bool((x == 3).all()), "a second group")
    x.fill_(5.0)
    dist.all_reduce(x, group=single)
    expect(bool((x == 5).all()), "a group of one")
    told = "new_group"
    if DEVICE == "cuda":
        half = dist.split_group(split_ranks=[[0, 1]])
        x = torch.full((1001,), 1.0 + rank, device=device)
        dist.all_reduce(x, group=half)
        expect(bool((x == 3).all()), "split_group of both")
        alone = dist.split_group(split_ranks=[[0], [1]])
        dist.all_reduce(x, group=alone)
        expect(bool((x == 3).all()), "split_group of one each")
        told += ", split_group"
        dist.destroy_process_group(half)
        dist.destroy_process_group(alone)
    dist.destroy_process_group(both)
    # The same ranks once more: what was destroyed leaves nothing behind.
    for _ in range(3):
        again = dist.new_group([0, 1])
        x = torch.full((3,), 1.0 + rank, device=device)
        dist.all_reduce(x, group=again)
        expect(bool((x == 3).all()), "a group made again")
        dist.destroy_process_group(again)
    return told + ", destroyed and made again"


def t_streams(torch, dist, rank, world, device):
    if DEVICE != "cuda":
        return "not here"
    streams = [torch.cuda.Stream() for _ in range(3)]
    results, works = [], []
    for step in range(60):
        with torch.cuda.stream(streams[step % 3]):
            x = torch.full((1001 + step,), float(step + rank), device=device)
            works.append(dist.all_reduce(x, async_op=True))
            results.append(x)
    for step, (work, x) in enumerate(zip(works, results)):
        with torch.cuda.stream(streams[step % 3]):
            work.wait()
            total = x.sum()
        streams[step % 3].synchronize()
        expect(float(total) == (2 * step + 1) * (1001 + step), f"step {step}")
    x = torch.zeros(64, device=device)
    for step in range(2000):
        x += 1
        dist.all_reduce(x, dist.ReduceOp.MAX)
    expect(bool((x == 2000).all()), "2000 small calls")
    return "60 asynchronous calls over 3 streams, 2000 small ones"


def t_graphs(torch, dist, rank, world, device):
    if DEVICE != "cuda":
        return "not here"
    done = []
    for n in (1, 1003, 100003, 4000003):
        x = torch.zeros(n, device=device)
        gathered = torch.zeros(n * world, device=device)
        scattered = torch.zeros(n, device=device)
        source = torch.zeros(n, device=device)

        def calls():
            x.copy_(source)
            dist.all_reduce(x)
            dist.all_gather_into_tensor(gathered, source)
            dist.reduce_scatter_tensor(scattered, gathered)

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            calls()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            calls()
        for step in range(12):
            source.copy_(ramp(torch, n, rank, device, 5, step).float())
            graph.replay()
            if step % 4 == 3:  # between replays, outside of the graph
                y = torch.ones(5, device=device)
                dist.all_reduce(y)
                expect(bool((y == world).all()), "a call between replays")
            torch.cuda.synchronize()
            inputs = [ramp(torch, n, r, device, 5, step).float() for r in range(world)]
            expect(torch.equal(x, sum(inputs)), f"all_reduce {n} replay {step}")
            expect(torch.equal(gathered, torch.cat(inputs)), f"all_gather {n} replay {step}")
            expect(torch.equal(scattered, torch.cat(inputs)[rank * n:(rank + 1) * n] * world), f"reduce_scatter {n} {step}")
        done.append(n)
        del graph
    return f"all_reduce, all_gather, reduce_scatter of {done} elements, 12 replays each"


def t_memory(torch, dist, rank, world, device):
    if DEVICE != "cuda":
        return "not here"
    backend = dist.group.WORLD._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool, device=device):
        x = torch.full((1 << 20,), 1.0 + rank, device=device)
    backend.register_mem_pool(pool)
    for _ in range(3):
        x.fill_(1.0 + rank)
        dist.all_reduce(x)
        expect(bool((x == 3).all()), "all_reduce of ncclMemAlloc's memory")
    backend.deregister_mem_pool(pool)
    del x
    return "a pool of ncclMemAlloc's memory, registered"


def t_functional(torch, dist, rank, world, device):
    import torch.distributed._functional_collectives as functional

    x = ramp(torch, 1003, rank, device).float()
    total = functional.all_reduce(x, "sum", dist.group.WORLD).clone()
    expect(torch.equal(total, sum(ramp(torch, 1003, r, device) for r in range(world)).float()), "all_reduce")
    gathered = functional.all_gather_tensor(x, 0, dist.group.WORLD).clone()
    expect(torch.equal(gathered, torch.cat([ramp(torch, 1003, r, device) for r in range(world)]).float()), "all_gather")
    version = torch.cuda.nccl.version() if DEVICE == "cuda" else None
    return f"all_reduce, all_gather_tensor; torch {torch.__version__}, NCCL {version}"


TORCH = [
    ("functional", 30, t_functional), ("all_reduce", 25, t_all_reduce), ("all_gather", 12, t_gathers),
    ("reduce_scatter", 12, t_reduce_scatter), ("all_to_all", 12, t_all_to_all),
    ("broadcast, reduce, gather, scatter", 12, t_rooted), ("send, recv", 12, t_send_recv),
    ("batch_isend_irecv", 12, t_batches), ("barrier", 12, t_barriers), ("coalescing", 12, t_coalesced),
    ("groups", 15, t_groups), ("streams", 15, t_streams), ("graphs", 15, t_graphs), ("memory pool", 12, t_memory),
    ("large", 15, t_large),
]


# ---------------------------------------------------------------- training

def training_setup(rank, world, state):
    if state == "load":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        import torch.nn.parallel  # noqa: F401
    return torch_setup(rank, world, state)


def model_of(torch, device):
    torch.manual_seed(1)
    n = torch.nn
    return n.Sequential(n.Linear(256, 512), n.GELU(), n.Linear(512, 512), n.LayerNorm(512), n.GELU(), n.Linear(512, 10)).to(device)


def train(torch, dist, rank, world, device, model, steps):
    torch.use_deterministic_algorithms(True, warn_only=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(100 + rank)
    losses, began = [], time.monotonic()
    for _ in range(steps):
        x = torch.randn(64, 256, generator=random).to(device)
        y = (x[:, :10] + x[:, 10:20]).argmax(1)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append((mean.item() / world).hex())
    return losses, time.monotonic() - began


def t_ddp(torch, dist, rank, world, device):
    from torch.nn.parallel import DistributedDataParallel

    ids = [rank] if DEVICE == "cuda" else None
    model = DistributedDataParallel(model_of(torch, device), device_ids=ids, bucket_cap_mb=1)
    losses, seconds = train(torch, dist, rank, world, device, model, 20)
    value("ddp", losses)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    others = [torch.zeros_like(weights) for _ in range(world)]
    dist.all_gather(others, weights)
    expect(all(torch.equal(weights, o) for o in others), "ranks have different weights")
    expect(float.fromhex(losses[-1]) < float.fromhex(losses[0]), f"no progress: {losses}")
    value("seconds-ddp", round(seconds, 3))
    return f"20 steps in {seconds:.2f} s, last loss {float.fromhex(losses[-1]):.9f}, the same weights everywhere"


def t_ddp_bf16(torch, dist, rank, world, device):
    if DEVICE != "cuda":
        return "not here"
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(model_of(torch, device), device_ids=[rank])
    model.register_comm_hook(None, bf16_compress_hook)
    losses, seconds = train(torch, dist, rank, world, device, model, 20)
    value("ddp-bf16", losses)
    return f"20 steps in {seconds:.2f} s"


def t_fsdp(torch, dist, rank, world, device):
    if DEVICE != "cuda":
        return "not here"
    from torch.distributed.fsdp import fully_shard

    model = model_of(torch, device)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    losses, seconds = train(torch, dist, rank, world, device, model, 20)
    value("fsdp", losses)
    return f"20 steps in {seconds:.2f} s"


TRAINING = [("ddp", 40, t_ddp), ("ddp with bf16 gradients", 20, t_ddp_bf16), ("fsdp", 30, t_fsdp)]


# ---------------------------------------------------------------- faults

# What is set, how rank 0 ends ("told": it says what it saw; "ends": PyTorch ends it), and what must be said.
QUIET = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
WAIT = dict(QUIET, TORCH_NCCL_BLOCKING_WAIT="1")
FAULTS = {
    # PyTorch's own limit is shorter than ours: it ends the wait and aborts.
    "timeout": (WAIT, "told", ["Timeout"]),
    # Ours is shorter: the error names who did not come.
    "straggler": (dict(WAIT, BEELINE_COMM_TIMEOUT="3"), "told", ["rank 1"]),
    "mismatch": (dict(WAIT, BEELINE_COMM_TIMEOUT="20"), "told", ["count 100", "count 200"]),
    "killed": (dict(WAIT, BEELINE_COMM_TIMEOUT="20"), "told", ["rank 1"]),
    "abort": (QUIET, "told", ["abort took"]),
    # Without blocking waits, PyTorch's watchdog finds the error and ends the process with its text.
    "watchdog": (dict(QUIET, BEELINE_COMM_TIMEOUT="3", TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="500"), "ends",
                 ["rank 1 did not come", "ncclRemoteError"]),
}


def fault_setup(name):
    def setup(rank, world, state):
        import torch
        import torch.distributed as dist

        if state == "load":
            return "loaded"
        if state is None:
            return None
        state = torch_group(torch, dist, rank, world, timeout=5 if name == "timeout" else 90)
        x = torch.ones(10, device=state[4])
        dist.all_reduce(x)
        torch.cuda.synchronize()
        return state
    return setup


def seen(torch, dist, call):
    """What an exception of `call` says, and after how long."""
    began = time.monotonic()
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__} after {time.monotonic() - began:.2f} s: {' '.join(str(error).split())[:700]}"
    raise AssertionError(f"no error after {time.monotonic() - began:.2f} s")


def fault_test(name):
    def run(torch, dist, rank, world, device):
        x = torch.ones(200 if name == "mismatch" and rank == 1 else 100, device=device)
        if name == "killed":
            big = torch.ones(1 << 24, device=device)
            if rank == 1:
                for _ in range(50):
                    dist.all_reduce(big)
                os.kill(os.getpid(), signal.SIGKILL)

            def many():
                for _ in range(5000):
                    dist.all_reduce(big)
            return seen(torch, dist, many)
        if name == "mismatch":
            return seen(torch, dist, lambda: dist.all_reduce(x))
        if rank == 1:
            time.sleep(60)  # killed before
        if name == "abort":
            work = dist.all_reduce(x, async_op=True)
            time.sleep(0.5)
            expect(not work.is_completed(), "the call ended without rank 1")
            began = time.monotonic()
            dist.distributed_c10d._abort_process_group()
            took = time.monotonic() - began
            torch.cuda.synchronize()
            y = torch.ones(5, device=device) + 1
            expect(float(y.sum()) == 10, "the device works no longer")
            return f"abort took {took * 1e3:.1f} ms, the stream was through after {(time.monotonic() - began) * 1e3:.1f} ms"
        if name == "watchdog":
            dist.all_reduce(x)
            time.sleep(60)  # the watchdog ends this process
            return "nothing ended this process"
        return seen(torch, dist, lambda: dist.all_reduce(x))
    return run


# ---------------------------------------------------------------- torchrun

def torchrun_worker():
    import torch
    import torch.distributed as dist

    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if DEVICE == "cuda":
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    device = torch.device(DEVICE, local) if DEVICE == "cuda" else torch.device("cpu")
    x = torch.full((1001,), rank + 1.0, device=device)
    dist.all_reduce(x)
    expect(bool((x == 3).all()), "all_reduce")
    dist.barrier()
    dist.destroy_process_group()
    print(f"torchrun rank {rank} ok", flush=True)


# ---------------------------------------------------------------- cupy

def cupy_setup(rank, world, state):
    if state == "load":
        import cupy  # noqa: F401
        from cupy.cuda import nccl  # noqa: F401
        return "loaded"
    if state is None:
        return None
    import cupy
    from cupy.cuda import nccl

    cupy.cuda.Device(rank).use()
    path = os.environ["CLIENTS_STORE"] + ".id"
    if rank == 0:
        with open(path + ".new", "w") as file:
            unique = nccl.get_unique_id()
            json.dump([type(unique).__name__, list(unique)], file)
        os.rename(path + ".new", path)
    while not os.path.exists(path):
        time.sleep(0.01)
    kind, unique = json.load(open(path))
    comm = nccl.NcclCommunicator(world, bytes(unique) if kind == "bytes" else tuple(unique), rank)
    return cupy, nccl, [(comm, rank)], world


def cupy_one_setup(rank, world, state):
    if state == "load":
        return cupy_setup(rank, world, state)
    if state is None:
        return None
    import cupy
    from cupy.cuda import nccl

    comms = nccl.NcclCommunicator.initAll([0, 1])
    return cupy, nccl, list(zip(comms, range(2))), 2


def c_calls(cupy, nccl, mine, world):
    """Every call of cupy's module, for the ranks that this process has."""
    cases = 0
    kinds = [("f4", nccl.NCCL_FLOAT32), ("f8", nccl.NCCL_FLOAT64), ("f2", nccl.NCCL_FLOAT16), ("i4", nccl.NCCL_INT32),
             ("i8", nccl.NCCL_INT64), ("u1", nccl.NCCL_UINT8), ("i1", nccl.NCCL_INT8), ("u4", nccl.NCCL_UINT32),
             ("u8", nccl.NCCL_UINT64)]

    def ramp_of(n, r, kind):
        return ((cupy.arange(n) * 7 + r * 3) % 5 + 1).astype(kind)

    def everywhere(call, n_in, n_out, kind, want, what):
        nonlocal cases
        held = []
        for comm, r in mine:
            with cupy.cuda.Device(r):
                stream = cupy.cuda.Stream(non_blocking=True)
                x, y = ramp_of(n_in, r, kind), cupy.zeros(n_out + 3, kind)
                cupy.cuda.runtime.deviceSynchronize()
                held.append((comm, r, x, y, stream))
        if len(held) > 1:
            nccl.groupStart()
        for comm, r, x, y, stream in held:
            with cupy.cuda.Device(r):
                call(comm, r, x.data.ptr, y.data.ptr, stream.ptr)
        if len(held) > 1:
            nccl.groupEnd()
        for comm, r, x, y, stream in held:
            with cupy.cuda.Device(r):
                stream.synchronize()
                expect(comm.check_async_error() in (None, 0), "async error")
                right = want(r)
                if right is not None:
                    expect(bool((y[:n_out] == right).all()), f"{what} {kind} rank {r}: {y[:4]} not {right[:4]}")
                expect(not y[n_out:].any(), f"{what} {kind}: wrote beyond the end")
        cases += 1

    for kind, number in kinds:
        for n in (1, 1003, 300001):
            def all_of(size, kind=kind):
                return cupy.stack([ramp_of(size, r, kind) for r in range(world)])
            for op, fold in ((nccl.NCCL_SUM, "sum"), (nccl.NCCL_PROD, "prod"), (nccl.NCCL_MAX, "max"), (nccl.NCCL_MIN, "min")):
                everywhere(lambda c, r, x, y, s: c.allReduce(x, y, n, number, op, s), n, n, kind,
                           lambda r: getattr(all_of(n), fold)(0).astype(kind), f"allReduce {fold} {n}")
            everywhere(lambda c, r, x, y, s: c.reduce(x, y, n, number, nccl.NCCL_SUM, 1, s), n, n, kind,
                       lambda r: all_of(n).sum(0).astype(kind) if r == 1 else None, f"reduce {n}")
            everywhere(lambda c, r, x, y, s: c.broadcast(x, y, n, number, 1, s), n, n, kind,
                       lambda r: ramp_of(n, 1, kind), f"broadcast {n}")
            everywhere(lambda c, r, x, y, s: c.allGather(x, y, n, number, s), n, n * world, kind,
                       lambda r: all_of(n).reshape(-1), f"allGather {n}")
            everywhere(lambda c, r, x, y, s: c.reduceScatter(x, y, n, number, nccl.NCCL_SUM, s), n * world, n, kind,
                       lambda r: all_of(n * world).sum(0)[r * n:(r + 1) * n].astype(kind), f"reduceScatter {n}")

            def both_ways(c, r, x, y, s):
                nccl.groupStart()
                c.send(x, n, number, 1 - r, s)
                c.recv(y, n, number, 1 - r, s)
                nccl.groupEnd()
            everywhere(both_ways, n, n, kind, lambda r: ramp_of(n, 1 - r, kind), f"send, recv {n}")
    comm, r = mine[0]
    facts = (comm.rank_id(), comm.size(), comm.device_id())
    expect(facts == (r, world, r), f"rank, size, device: {facts}")
    return f"{cases} calls of {len(kinds)} types; NCCL {nccl.get_version()}, cupy built with {nccl.get_build_version()}"


def c_in_place(cupy, nccl, mine, world):
    held = []
    for comm, r in mine:
        with cupy.cuda.Device(r):
            held.append((comm, r, cupy.full(1001, r + 1, "f4"), cupy.cuda.Stream(non_blocking=True)))
            cupy.cuda.runtime.deviceSynchronize()
    nccl.groupStart()
    for comm, r, x, stream in held:
        with cupy.cuda.Device(r):
            comm.allReduce(x.data.ptr, x.data.ptr, 1001, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
            comm.bcast(x.data.ptr, 1001, nccl.NCCL_FLOAT32, 0, stream.ptr)
    nccl.groupEnd()
    for comm, r, x, stream in held:
        with cupy.cuda.Device(r):
            stream.synchronize()
            expect(bool((x == 3).all()), "in place")
    return "allReduce and bcast in place, in one group"


def c_capture(cupy, nccl, mine, world):
    """One communicator on two streams of one capture, which nothing of the program's orders."""
    if len(mine) > 1:
        return "one process a rank only"
    comm, r = mine[0]
    n = 300001
    first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    xs = [cupy.zeros(n, "f4") for _ in range(6)]
    source = cupy.zeros(n, "f4")
    fork, join = cupy.cuda.Event(disable_timing=True), cupy.cuda.Event(disable_timing=True)
    total = (nccl.NCCL_FLOAT32, nccl.NCCL_SUM)
    cupy.cuda.runtime.deviceSynchronize()
    first.begin_capture()
    fork.record(first)
    second.wait_event(fork)
    for i, x in enumerate(xs):
        # Rank 1 takes the streams in the other order: calls are ordered by when they were made.
        stream = (first, second)[(i + r) % 2]
        comm.allReduce(source.data.ptr, x.data.ptr, n - i, *total, stream.ptr)
    join.record(second)
    first.wait_event(join)
    graph = first.end_capture()
    for step in range(20):
        source[...] = step + r
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(first)
        first.synchronize()
        for i, x in enumerate(xs):
            expect(bool((x[:n - i] == 2 * step + 1).all()), f"replay {step}, call {i}: {x[:3]}")
    expect(comm.check_async_error() in (None, 0), "async error")
    return "6 calls over 2 streams of one capture, 20 replays"


def c_end(cupy, nccl, mine, world):
    for comm, _ in mine[:-1]:
        comm.destroy()
    began = time.monotonic()
    mine[-1][0].abort()
    return f"destroy; abort took {(time.monotonic() - began) * 1e3:.1f} ms"


CUPY = [("calls", 30, c_calls), ("in place", 10, c_in_place), ("capture", 20, c_capture), ("end", 10, c_end)]


# ---------------------------------------------------------------- ctypes

def ctypes_setup(rank, world, state):
    import ctypes

    import cupy
    import ml_dtypes
    import numpy

    if state == "load":
        return "loaded"
    if state is None:
        return None
    lib = ctypes.CDLL(os.environ.get("NCCL_PATH", "libnccl.so.2"))
    lib.ncclGetLastError.restype = lib.ncclGetErrorString.restype = ctypes.c_char_p
    return ctypes, cupy, numpy, ml_dtypes, lib


class Id:
    """ncclUniqueId, which is passed by value."""

    made = None

    def __new__(cls, ctypes):
        cls.made = cls.made or type("ncclUniqueId", (ctypes.Structure,), {"_fields_": [("bytes", ctypes.c_char * 128)]})
        return cls.made()


def must(lib, code, what, wanted=0):
    expect(code == wanted, f"{what} answered {code}, not {wanted}: {lib.ncclGetLastError(None)}")


def config_of(ctypes, blocking):
    undefined = -(1 << 31)
    fields = [("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", ctypes.c_int),
              ("cga", ctypes.c_int), ("least", ctypes.c_int), ("most", ctypes.c_int), ("net", ctypes.c_void_p),
              ("share", ctypes.c_int), ("traffic", ctypes.c_int), ("name", ctypes.c_void_p), ("more", ctypes.c_int * 6)]
    kind = type("ncclConfig_t", (ctypes.Structure,), {"_fields_": fields})
    config = kind(ctypes.sizeof(kind), 0xcafebeef, 22809, blocking, undefined, undefined, undefined, None, undefined, undefined,
                  None)
    for at in range(6):
        config.more[at] = undefined
    return config


def pair_of(ctypes, cupy, lib, blocking=1):
    """Both ranks of a communicator, made in one group."""
    unique = Id(ctypes)
    must(lib, lib.ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
    comms = [ctypes.c_void_p(), ctypes.c_void_p()]
    config = config_of(ctypes, blocking)
    if blocking:
        lib.ncclGroupStart()
    for r in range(2):
        with cupy.cuda.Device(r):
            cupy.zeros(1)
            code = lib.ncclCommInitRankConfig(ctypes.byref(comms[r]), 2, unique, r, ctypes.byref(config))
            expect(code in ((0,) if blocking else (0, 7)), f"ncclCommInitRankConfig answered {code}")
    if blocking:
        must(lib, lib.ncclGroupEnd(), "ncclGroupEnd")
    for comm in comms:
        ready(ctypes, lib, comm)
    return comms


def ready(ctypes, lib, comm):
    state, end = ctypes.c_int(7), time.monotonic() + 10
    while state.value == 7 and time.monotonic() < end:
        must(lib, lib.ncclCommGetAsyncError(comm, ctypes.byref(state)), "ncclCommGetAsyncError")
        time.sleep(0.001)
    must(lib, state.value, "the communicator")


def small_sum(ctypes, cupy, lib, comms):
    """An all-reduce over `comms` (one a device), compared."""
    held = []
    lib.ncclGroupStart()
    for r, comm in enumerate(comms):
        with cupy.cuda.Device(r):
            x, stream = cupy.full(1001, r + 1, "f4"), cupy.cuda.Stream(non_blocking=True)
            cupy.cuda.runtime.deviceSynchronize()
            pointer = ctypes.c_void_p(x.data.ptr)
            must(lib, lib.ncclAllReduce(pointer, pointer, ctypes.c_size_t(1001), 7, 0, comm, ctypes.c_void_p(stream.ptr)),
                 "ncclAllReduce")
            held.append((r, x, stream))
    must(lib, lib.ncclGroupEnd(), "ncclGroupEnd")
    want = sum(range(1, len(comms) + 1))
    for r, x, stream in held:
        with cupy.cuda.Device(r):
            stream.synchronize()
            expect(bool((x == want).all()), f"all-reduce over {len(comms)} ranks: {x[:3]}")


def y_all_types(ctypes, cupy, numpy, ml, lib):
    """Each type with each operation, pre-multiplied sums with factors on the host and the device, as nccl-tests does."""
    version = ctypes.c_int()
    must(lib, lib.ncclGetVersion(ctypes.byref(version)), "ncclGetVersion")
    types = [numpy.int8, numpy.uint8, numpy.int32, numpy.uint32, numpy.int64, numpy.uint64, numpy.float16, numpy.float32,
             numpy.float64, ml.bfloat16, ml.float8_e4m3fn, ml.float8_e5m2]
    comms, cases = pair_of(ctypes, cupy, lib), 0
    streams = []
    for r in range(2):
        with cupy.cuda.Device(r):
            streams.append(cupy.cuda.Stream(non_blocking=True))
    for number, kind in enumerate(types):
        size = numpy.dtype(kind).itemsize
        top = 2 if number >= 10 else 4
        for n in (1, 5, 1003, 70001, 600011):
            whole = [((numpy.arange(n) * 7 + r * 3) % top + 1) for r in range(2)]
            floating = number >= 6
            for op in ("sum", "prod", "max", "min", "avg", "mulsum-host", "mulsum-device"):
                factors = [1, 2] if floating is False or number >= 10 else [0.5, 2]
                a, b = whole
                want = {"sum": lambda: a + b, "prod": lambda: a * b, "max": lambda: numpy.maximum(a, b),
                        "min": lambda: numpy.minimum(a, b),
                        "avg": lambda: (a + b) / 2 if floating else (a + b) // 2}.get(op, lambda: factors[0] * a + factors[1] * b)()
                want = want.astype(numpy.float32 if number >= 9 else kind).astype(kind)
                ops, held = [ctypes.c_int(), ctypes.c_int()], []
                for r in range(2):
                    with cupy.cuda.Device(r):
                        scalar = numpy.array([factors[r]], numpy.float32).astype(kind)
                        on_device = cupy.asarray(scalar.view(numpy.uint8))
                        x = cupy.asarray(whole[r].astype(numpy.float32).astype(kind).view(numpy.uint8))
                        y = cupy.zeros(n * size + 16, cupy.uint8)
                        cupy.cuda.runtime.deviceSynchronize()
                        held.append((scalar, on_device, x, y))
                        if op.startswith("mulsum"):
                            where = (scalar.ctypes.data, 1) if op == "mulsum-host" else (on_device.data.ptr, 0)
                            must(lib, lib.ncclRedOpCreatePreMulSum(ctypes.byref(ops[r]), ctypes.c_void_p(where[0]), number, where[1],
                                                                   comms[r]), "ncclRedOpCreatePreMulSum")
                        else:
                            ops[r].value = ["sum", "prod", "max", "min", "avg"].index(op)
                lib.ncclGroupStart()
                for r in range(2):
                    _, _, x, y = held[r]
                    must(lib, lib.ncclAllReduce(ctypes.c_void_p(x.data.ptr), ctypes.c_void_p(y.data.ptr), ctypes.c_size_t(n), number,
                                                ops[r].value, comms[r], ctypes.c_void_p(streams[r].ptr)), f"ncclAllReduce {op}")
                must(lib, lib.ncclGroupEnd(), "ncclGroupEnd")
                if op.startswith("mulsum"):
                    for r in range(2):
                        must(lib, lib.ncclRedOpDestroy(ops[r].value, comms[r]), "ncclRedOpDestroy")
                for r in range(2):
                    with cupy.cuda.Device(r):
                        streams[r].synchronize()
                        got = cupy.asnumpy(held[r][3])
                    expect(not got[n * size:].any(), f"{kind.__name__} {op} {n}: wrote beyond the end")
                    got = got[:n * size].view(kind)
                    if not numpy.array_equal(got.view(numpy.uint8), want.view(numpy.uint8)):
                        at = int(numpy.argmax(got.astype(numpy.float64) != want.astype(numpy.float64)))
                        raise AssertionError(f"{kind.__name__} {op} {n} rank {r} [{at}]: {got[at]} not {want[at]}")
                cases += 1
    for comm in comms:
        must(lib, lib.ncclCommDestroy(comm), "ncclCommDestroy")
    return f"{cases} cases, 12 types x 7 operations; version {version.value}"


def y_communicators(ctypes, cupy, numpy, ml, lib):
    comms = pair_of(ctypes, cupy, lib)
    small_sum(ctypes, cupy, lib, comms)
    told = ["config"]
    made = [ctypes.c_void_p(), ctypes.c_void_p()]
    lib.ncclGroupStart()
    for r in range(2):
        must(lib, lib.ncclCommSplit(comms[r], 0, -r, ctypes.byref(made[r]), None), "ncclCommSplit")
    must(lib, lib.ncclGroupEnd(), "ncclGroupEnd")
    count, rank = ctypes.c_int(), ctypes.c_int()
    lib.ncclCommCount(made[0], ctypes.byref(count))
    lib.ncclCommUserRank(made[0], ctypes.byref(rank))
    expect((count.value, rank.value) == (2, 1), f"split: rank {rank.value} of {count.value}")
    small_sum(ctypes, cupy, lib, made)
    told.append("split, ranks turned round")
    alone, excluded = ctypes.c_void_p(), (ctypes.c_int * 1)(1)
    must(lib, lib.ncclCommShrink(comms[0], excluded, 1, ctypes.byref(alone), None, 0), "ncclCommShrink")
    lib.ncclCommCount(alone, ctypes.byref(count))
    expect(count.value == 1, f"shrink: {count.value} ranks")
    small_sum(ctypes, cupy, lib, [alone])
    told.append("shrink")
    for comm in made + [alone]:
        must(lib, lib.ncclCommFinalize(comm), "ncclCommFinalize")
        must(lib, lib.ncclCommDestroy(comm), "ncclCommDestroy")
    later = pair_of(ctypes, cupy, lib, blocking=0)
    small_sum(ctypes, cupy, lib, later)
    told.append("not blocking")
    for comm in later + comms:
        must(lib, lib.ncclCommDestroy(comm), "ncclCommDestroy")
    both = (ctypes.c_void_p * 2)()
    must(lib, lib.ncclCommInitAll(both, 2, None), "ncclCommInitAll")
    both = [ctypes.c_void_p(one) for one in both]
    small_sum(ctypes, cupy, lib, both)
    told.append("initAll")
    for comm in both:
        must(lib, lib.ncclCommDestroy(comm), "ncclCommDestroy")
    return ", ".join(told)


def y_memory(ctypes, cupy, numpy, ml, lib):
    comms = pair_of(ctypes, cupy, lib)
    n, held = 1 << 20, []
    for r in range(2):
        with cupy.cuda.Device(r):
            place, handle = ctypes.c_void_p(), ctypes.c_void_p()
            must(lib, lib.ncclMemAlloc(ctypes.byref(place), ctypes.c_size_t(n * 4)), "ncclMemAlloc")
            must(lib, lib.ncclCommRegister(comms[r], place, ctypes.c_size_t(n * 4), ctypes.byref(handle)), "ncclCommRegister")
            memory = cupy.cuda.UnownedMemory(place.value, n * 4, lib)
            x = cupy.ndarray((n,), "f4", cupy.cuda.MemoryPointer(memory, 0))
            x[...] = r + 1
            cupy.cuda.runtime.deviceSynchronize()
            held.append((r, place, handle, x, cupy.cuda.Stream(non_blocking=True)))
    lib.ncclGroupStart()
    for r, place, _, _, stream in held:
        must(lib, lib.ncclAllReduce(place, place, ctypes.c_size_t(n), 7, 0, comms[r], ctypes.c_void_p(stream.ptr)), "ncclAllReduce")
    must(lib, lib.ncclGroupEnd(), "ncclGroupEnd")
    for r, place, handle, x, stream in held:
        with cupy.cuda.Device(r):
            stream.synchronize()
            expect(bool((x == 3).all()), "registered memory")
            must(lib, lib.ncclCommDeregister(comms[r], handle), "ncclCommDeregister")
            must(lib, lib.ncclMemFree(place), "ncclMemFree")
    for comm in comms:
        must(lib, lib.ncclCommDestroy(comm), "ncclCommDestroy")
    return "ncclMemAlloc, ncclCommRegister, all-reduce, back"


def y_abort(ctypes, cupy, numpy, ml, lib):
    comms = pair_of(ctypes, cupy, lib)
    with cupy.cuda.Device(0):
        x, stream = cupy.ones(1001, "f4"), cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.deviceSynchronize()
        pointer = ctypes.c_void_p(x.data.ptr)
        must(lib, lib.ncclAllReduce(pointer, pointer, ctypes.c_size_t(1001), 7, 0, comms[0], ctypes.c_void_p(stream.ptr)), "alone")
        time.sleep(0.2)
        expect(not stream.done, "a call ended without the other rank")
        began = time.monotonic()
        must(lib, lib.ncclCommAbort(comms[0]), "ncclCommAbort")
        took = time.monotonic() - began
        stream.synchronize()
        through = time.monotonic() - began
    must(lib, lib.ncclCommAbort(comms[1]), "ncclCommAbort")
    expect(took < 0.1, f"abort took {took * 1e3:.1f} ms")
    return f"abort took {took * 1e3:.2f} ms, the stream was through after {through * 1e3:.2f} ms"


def y_init_time(ctypes, cupy, numpy, ml, lib):
    took = []
    free = []
    for _ in range(3):
        with cupy.cuda.Device(0):
            before = cupy.cuda.runtime.memGetInfo()[0]
        began = time.monotonic()
        comms = pair_of(ctypes, cupy, lib)
        took.append(round((time.monotonic() - began) * 1e3, 1))
        with cupy.cuda.Device(0):
            free.append((before - cupy.cuda.runtime.memGetInfo()[0]) >> 20)
        for comm in comms:
            must(lib, lib.ncclCommDestroy(comm), "ncclCommDestroy")
    return f"two ranks ready after {took} ms; {free} MiB of device 0"


CTYPES = [("communicators", 30, y_communicators), ("memory", 15, y_memory), ("abort", 15, y_abort),
          ("time of init", 20, y_init_time), ("types and operations", 45, y_all_types)]


# ---------------------------------------------------------------- JAX

def jax_setup(rank, world, state):
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if state == "load":
        return "loaded"
    return None if state is None else (jax,)


def j_collectives(jax):
    import numpy

    n = 1003
    devices = jax.devices()[:2]
    expect(len(devices) == 2, f"{devices}")
    x = (numpy.arange(2 * n) % 5 + 1).astype(numpy.float32).reshape(2, n)

    def call(a):
        return (jax.lax.psum(a, "i"), jax.lax.pmax(a, "i"), jax.lax.all_gather(a, "i"),
                jax.lax.ppermute(a, "i", [(0, 1), (1, 0)]), jax.lax.psum_scatter(a[:1002], "i", tiled=True))
    total, most, gathered, swapped, scattered = jax.pmap(call, axis_name="i", devices=devices)(x)
    for r in range(2):
        expect(numpy.array_equal(total[r], x.sum(0)), "psum")
        expect(numpy.array_equal(most[r], x.max(0)), "pmax")
        expect(numpy.array_equal(gathered[r], x), "all_gather")
        expect(numpy.array_equal(swapped[r], x[1 - r]), "ppermute")
        expect(numpy.array_equal(scattered[r], x.sum(0)[:1002][r * 501:(r + 1) * 501]), "psum_scatter")
    return f"psum, pmax, all_gather, ppermute, psum_scatter; jax {jax.__version__}"


PARTS = {
    "torch": (torch_setup, TORCH),
    "training": (training_setup, TRAINING),
    "cupy": (cupy_setup, CUPY),
    "cupy-one": (cupy_one_setup, CUPY),
    "ctypes": (ctypes_setup, CTYPES),
    "jax": (jax_setup, [("collectives of one process", 60, j_collectives)]),
}
PARTS.update({f"fault-{name}": (fault_setup(name), [(name, 60, fault_test(name))]) for name in FAULTS})

if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["--torchrun"]:
        torchrun_worker()
    else:
        sys.exit(main())
