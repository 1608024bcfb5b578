# SPDX-License-Identifier: MIT
"""The parts of bench/sidebyside.py: the problems (rows.py), the contestants (contestants.py) and the timing (timing.py)."""
