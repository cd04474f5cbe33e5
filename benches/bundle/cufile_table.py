"""Tables from the rows of cufile_bench: medians by library, and ratios to the first name given.

usage: cufile_table.py ROWS.csv BASE NAME...
"""

import collections
import csv
import math
import statistics
import sys

rows = collections.defaultdict(list)
for row in csv.reader(open(sys.argv[1])):
    if len(row) == 10:
        name, _, op, size, threads, gbps, p50, p99, cpu, same = row
        rows[name, op, int(size), int(threads)].append((float(gbps), float(p50), float(p99), float(cpu), same))


def median(name, cell):
    found = rows.get((name,) + cell)
    return [statistics.median(x[i] for x in found) for i in range(4)] if found else None


base, names = sys.argv[2], sys.argv[3:]
cells = sorted({key[1:] for key in rows})
short = lambda n: f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}K"
print(f"GB/s (median); ratio to {base}; p99 us; CPU-s/GiB")
for name in names:
    ratios, low = [], []
    print(f"--- {name} / {base}")
    for cell in cells:
        a, b = median(base, cell), median(name, cell)
        if not a or not b or not a[0]:
            continue
        ratio = b[0] / a[0]
        if cell[0] in ("read", "write"):
            ratios.append(ratio)
        flags = ("  <0.95" if ratio < 0.95 else "") + (" p99" if b[2] > a[2] * 1.1 else "")
        flags += " cpu" if b[3] > a[3] * 1.1 else ""
        print(f"{cell[0]:9} {short(cell[1]):>4} x{cell[2]:<2} {a[0]:8.3f} {b[0]:8.3f}  {ratio:5.2f}  "
              f"p50 {a[1]:8.1f} {b[1]:8.1f}  p99 {a[2]:8.1f} {b[2]:8.1f}  cpu {a[3]:7.3f} {b[3]:7.3f}{flags}")
    if ratios:
        print(f"    {len(ratios)} cells, lowest {min(ratios):.2f}, geometric mean "
              f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}")
wrong = [key for key, found in rows.items() if any(x[4] == "NO" for x in found)]
print("bytes compared:", "all readers equal" if not wrong else f"DIFFERENT in {wrong}")
