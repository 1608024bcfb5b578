# SPDX-License-Identifier: MIT
"""Shows where the machine code of each source line lies in a kernel, and so which code a call executes after the first 64 KB.

code_places.py LISTING KERNEL DEPTH [FILTER]. LISTING is the output of `nvdisasm -c -gi` for a cubin that nvcc made with
-lineinfo. A line of output has the size, the first and last address, all in KB, and DEPTH callers, from the outermost on.
"""

import re
import sys

listing, kernel, depth = sys.argv[1], sys.argv[2], int(sys.argv[3])
wanted = sys.argv[4] if len(sys.argv) > 4 else ""
inside, fresh, chain, places = False, True, [], {}
for line in open(listing, encoding="utf-8"):
    if line.startswith(".text."):
        inside = line.startswith(f".text.{kernel}:")
    source = re.search(r'//## File "([^"]+)", line (\d+)', line) if inside else None
    if source:
        chain = [] if fresh else chain
        fresh = False
        chain.append(source[1].split("/")[-1].replace(".cuh", "") + ":" + source[2])
        continue
    instruction = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", line) if inside else None
    if not instruction:
        continue
    fresh = True
    name, at = " < ".join(chain[::-1][1 : 1 + depth]), int(instruction[1], 16)
    if wanted in name:
        count, first, _ = places.get(name, (0, at, at))
        places[name] = (count + 16, first, at)
for name, (count, first, last) in sorted(places.items(), key=lambda place: place[1][1]):
    if count >= 512:
        print(f"{count / 1024:6.2f} KB  {first / 1024:.1f} to {last / 1024:.1f}  {name}")
