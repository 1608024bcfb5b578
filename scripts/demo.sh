#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# demo.sh - computes one decode step of a small batch with the built command, into demo/. Takes a few seconds on two
# cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
flashmla=build/release/flashmla
mkdir -p demo
say() { printf '\n== %s\n' "$*"; }

# Lengths as a server may have them: most conversations short, one long, one just begun.
say 'A batch of 8 requests of 1 to 4000 cached keys, in shuffled pages, 128 heads of 576: demo/batch.safetensors'
"$flashmla" make-input demo/batch.safetensors --heads 128 --seq-lens 900,1,350,4000,64,1500,129,777

say 'Attention of one new token of each, timed, and compared with the oracle (scalar, double precision)'
"$flashmla" run demo/batch.safetensors --check --out demo/result.safetensors

say 'How that batch is cut into 16 equal loads, as for 16 workers; a request may be split over several'
"$flashmla" plan demo/batch.safetensors --partitions 16 --svg demo/plan.svg

say 'Done. The picture of the plan is demo/plan.svg; any browser shows it.'
