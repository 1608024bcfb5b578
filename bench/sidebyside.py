# SPDX-License-Identifier: MIT
"""Times flash_mla beside published kernels for Hopper: the same tensors, one process, runs in turns.

    python3 bench/sidebyside.py fetch FOLDER [--python 3.12]
    python3 bench/sidebyside.py time OUT.jsonl --peers FOLDER [--groups dense mha] [--runs 15] [--flush engine]
                                     [--without ours_deterministic]
    python3 bench/sidebyside.py errors OUT.jsonl

`fetch` downloads the peers' wheels with pip and unpacks what is needed of them into FOLDER: FlashMLA, FlashAttention-3
and vLLM's own FP8 decode, which vLLM's wheel contains, and FlashAttention-4 with the packages that compile it. It needs
no GPU. --python is the version of the Python that will run `time`, on a machine of the same kind. cuDNN comes with
PyTorch.

`time` needs a Hopper GPU, this package and PyTorch 2.10 or later; FlashAttention-4 also needs cuda-bindings and
protobuf. It appends one line of JSON a row to OUT.jsonl and prints a summary. FOLDER may lack peers: rows are then
timed with those that are there, and the exit code is 1.

A run is one replay of a CUDA graph of one call, with all kernels of the call; the plan of a decode is made before.
Before each run, two products with 264 MB of weights each leave the caches as an engine does (--flush engine), or 512 MB
are read (--flush read). The order of the contestants rotates from run to run, and the median counts. The ratio of a
row is the time of its fastest peer divided by ours. Outputs of the graphs are compared before timing; a row whose outputs differ
is not timed.

The group fp8 has dense decode with FP8 products, over caches of FP8_576 beside vLLM's, and over FP8_656 without a peer
or a ratio. ours takes e4m3 queries, as vLLM's does, and over FP8_656 bf16 ones; ours_bf16_q quantises bf16 queries in
the call; ours_bf16 has products in bf16, and ours_bf16_cache has them over a bf16 cache of the same values. Ours is also compared
with fp32 arithmetic of one request; others may differ from ours by e4m3 rounding.

The groups mha_chunk and mha_chunk_64 have chunks of a long prompt, 16 to 2048 queries over 8192 to 131072 keys, beside
FlashAttention-3 with its own number of splits (fa3_splits); mha_chunk_64 has heads of 64. The group mha_short has many short
prompts, mha_256 and mha_256_bwd have heads of 256, mha_96_bwd has gradients at 96/64, mha_gqa_bwd those of grouped heads.

The group mha_mixed has batches of a server that prefills in chunks: 31 requests of one query over 2048 to 32768 keys and one of
2048 queries over 8192, and 8 requests of 64 to 1024 queries over 4096 to 65536 keys; and batches of 1, 16 and 64 requests of one
query. Peers are FlashAttention-3 without splits (fa3) and with its own number of them, and FlashAttention-4, which has no splits
on Hopper. ours_invariant is ours with batch_invariant, which splits the keys of each request as if it were alone;
share_invariant is the time of ours, which plans for the whole batch, over its time.

The group mha_sink has a sink a head, mha_used has room for more keys than are in use (seqused_k); peers are fa3 and fa3_splits.

The group mha_bwd has the gradients of dense MHA by torch.autograd.grad; the forward pass is not timed. Its runs are calls, not
graphs; the GPU waits for some 2 ms before each, to hide the host's time. ours_direct is our operator without autograd. Ours is
compared with fp32 arithmetic too, for one key head of one sequence, and a deterministic call with a second one, bit for bit.
ratio_deterministic is FlashAttention-4's deterministic time over ours, share_deterministic our time over our deterministic one. A
row without FlashAttention-4 has no ratio. A call of more than half a second is not timed, nor are later ones of the same
contestant with as much to do; --without leaves a call of ours out altogether.

The groups sm80 and sm80_bwd have dense MHA and its gradients by the kernels for every GPU since Ampere, cuda-sm80,
which are forced, beside FlashAttention-2 of PyTorch. The group sm80 has chunks of a long prompt too, without a mask.
Values of 128 beside keys of 192 are padded for FlashAttention-2. Gradients are made, compared and timed as those of
mha_bwd are. The library reads only once which kernels are forced, so such a group is timed only if named, and alone.

The group accuracy has errors and no times: against double arithmetic on the same tensors, of the last requests, the
last tokens or one head. rms and worst are the root mean square and the largest of the differences, over the root mean
square of the exact result. Where peaky, queries are six times as large. A ratio, such as output_rms_ratio, is our error
over the least of any peer, at most 1.05 for rms and 1.2 for worst; `beyond` names those that are more. That does not
change the exit code. A contestant with an rms of 0.25 or more computed something else and loses its place.
FlashAttention-4, which compiles for seconds, takes part in the causal rows in bf16 alone. `errors` prints the table of
a record's last such run, for docs/performance.md.

The exit code is 0, 1 if a row lacks ours or a peer or its outputs differ, or 2 if the arguments or the machine are refused.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import zipfile

try:
    import torch
except ImportError:  # only `time` needs it
    torch = None

from beside.contestants import Ours, brief, contestants_for
from beside.errors import table_of
from beside.rows import FORCED, GROUPS, shape_of, words_for
from beside.timing import Session, summary, what_comes_before


def refuse(text):
    print(f"sidebyside.py: {text}", file=sys.stderr)
    sys.exit(2)


def driver_version():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def check_machine():
    if torch is None:
        refuse("time: PyTorch is not installed for this Python; 2.10 or later is needed, with CUDA")
    if not torch.cuda.is_available():
        refuse("time: PyTorch finds no GPU here; one of compute capability 9.0 (Hopper) is needed")
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        gpu = torch.cuda.get_device_name()
        refuse(f"time: the GPU is {gpu} of compute capability {'%d.%d' % capability}; 9.0 (Hopper) is needed")
    try:
        Ours()
    except ImportError as error:
        refuse(
            f"time: the package flash_mla cannot be imported ({error}); install it, or name its folder in PYTHONPATH"
        )


def force_kernels(groups):
    forced = [FORCED[group] for group in groups if group in FORCED]
    if forced and len(forced) < len(groups):
        refuse(f"--groups: {', '.join(FORCED)} cannot be timed with groups that have other kernels; must be by itself")
    if forced:
        os.environ["FLASHMLA_KERNEL"] = ",".join(forced)


def time_rows(options):
    force_kernels(options.groups)
    if not options.peers.is_dir():
        refuse(f"--peers: {options.peers} is no folder; must be one that `sidebyside.py fetch` has filled")
    check_machine()
    try:
        out = open(options.out, "a")
    except OSError as error:
        refuse(f"OUT.jsonl: {error}; must be a file that lines can be appended to")
    torch.set_default_device("cuda:0")
    rows = [(group, row) for group in GROUPS if group in options.groups for row in GROUPS[group]]
    present, absent = contestants_for([row for _, row in rows], options.peers)
    for name, why in absent.items():
        print(f"{name} is not there: {why}")
    now = int(time.time())
    seed = now if options.seed is None else options.seed
    machine = dict(run=now, gpu=torch.cuda.get_device_name(), driver=driver_version(), torch=torch.__version__)
    method = dict(flush=options.flush, runs=options.runs, seed=seed)
    before = what_comes_before(options.flush)
    session = Session(present, absent, seed, before, options.runs, options.without)
    lines, all_wrong = [], []
    with out:
        for _, row in rows:
            measured, wrong = session.outcome(row)
            print(words_for(row), *(f"{name}={value}" for name, value in measured.items()), *wrong, flush=True)
            all_wrong += [f"{words_for(row)}: {text}" for text in wrong]
            lines.append(None)
            if measured:
                took_part = [name for name in row.peers if name not in measured.get("lacks", ())]
                who = dict(ours=present["ours"].version, peers={name: present[name].version for name in took_part})
                how = dict(seed=seed) if row.of_errors else method
                lines[-1] = {"kind": row.kind, **shape_of(row), **machine, **who, **how, **measured}
                print(json.dumps(lines[-1]), file=out, flush=True)
    print(*summary(rows, lines, all_wrong), sep="\n")
    return 1 if all_wrong else 0


def print_table(options):
    try:
        texts = table_of(options.record)
    except (OSError, ValueError, KeyError) as error:
        refuse(f"OUT.jsonl: {brief(error)}; must be a file that `sidebyside.py time` has written")
    if not texts:
        refuse(f"OUT.jsonl: {options.record} has no errors; must have rows of the group accuracy")
    print(*texts, sep="\n")
    return 0


VARIANTS = {name: who for rows in GROUPS.values() for row in rows for name, (who, _) in row.variants.items()}
NOT_FORCED = [group for group in GROUPS if group not in FORCED]
OURS = [name for name, who in VARIANTS.items() if who == "ours"]

VLLM = "vllm==0.33.0"
VLLM_LIBRARIES = (
    "vllm/_flashmla_C.abi3.so",
    "vllm/_flashmla_extension_C.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
FA4 = (
    "flash-attn-4==4.0.0b36",
    "nvidia-cutlass-dsl==4.8.1",
    "nvidia-cutlass-dsl-libs-base==4.8.1",
    "nvidia-cutlass-dsl-libs-core==4.8.1",
    "nvidia-cutlass-dsl-libs-cu13==4.8.1",
    "quack-kernels==0.6.5",
    "apache-tvm-ffi==0.1.15.post2",
    "torch-c-dlpack-ext==0.1.5",
)
FA4_UNUSED = "nvidia_cutlass_dsl/cu13/lib/stubs/"  # for other machines


def fetch(options):
    folder = options.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"FOLDER: {error}; must be a folder that can be written, new or empty")
    if any(folder.iterdir()):
        refuse(f"FOLDER: {folder} is not empty; must be new or empty")
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--pre", "--only-binary=:all:", "--dest", wheels]
        if subprocess.run([*pip, "--python-version", options.python, VLLM, *FA4]).returncode:
            print("sidebyside.py: fetch: pip could not download the wheels", file=sys.stderr)
            return 1
        for wheel in pathlib.Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                if wheel.name.startswith("vllm-"):
                    unpack_vllm(archive, folder)
                else:
                    names = [name for name in archive.namelist() if not name.startswith(FA4_UNUSED)]
                    archive.extractall(folder / "fa4", names)
    print(f"{folder} has the peers for Python {options.python}: give it to `sidebyside.py time` as --peers")
    return 0


def unpack_vllm(archive, folder):
    """Its libraries, beside each other, and the file that tells its version."""
    for name in VLLM_LIBRARIES:
        (folder / pathlib.PurePosixPath(name).name).write_bytes(archive.read(name))
    archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")])


def count(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text}, must be a whole number from 1 on")
    return int(text)


def python_version(text):
    if not re.fullmatch(r"3\.\d+", text):
        raise argparse.ArgumentTypeError(f"is {text}, must be a version such as 3.12")
    return text


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="sidebyside.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="fetch | time | errors")
    own = "%d.%d" % sys.version_info[:2]
    command = commands.add_parser("fetch", help="download the peers into a folder")
    command.add_argument("folder", metavar="FOLDER", type=pathlib.Path, help="new or empty")
    command.add_argument("--python", type=python_version, default=own, help=f"that will run them; this one's, {own}")
    command.set_defaults(function=fetch)
    command = commands.add_parser("time", help="time them beside flash_mla")
    command.add_argument("out", metavar="OUT.jsonl", type=pathlib.Path, help="lines are appended to it")
    command.add_argument("--peers", metavar="FOLDER", type=pathlib.Path, required=True, help="that fetch has filled")
    command.add_argument("--groups", nargs="+", choices=list(GROUPS), default=NOT_FORCED, help="of rows; all but sm80*")
    command.add_argument("--runs", type=count, default=15, help="of each contestant in a row; 15")
    command.add_argument("--flush", choices=["engine", "read"], default="engine", help="what is done before a run")
    command.add_argument("--without", nargs="+", choices=OURS, default=[], help="calls of ours that are left out; none")
    command.add_argument("--seed", type=int, help="of all that is drawn; the time")
    command.set_defaults(function=time_rows)
    command = commands.add_parser("errors", help="print the table of the errors in a record")
    command.add_argument("record", metavar="OUT.jsonl", type=pathlib.Path, help="that time has written")
    command.set_defaults(function=print_table)
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    return options.function(options)


if __name__ == "__main__":
    sys.exit(main())
