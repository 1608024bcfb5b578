# SPDX-License-Identifier: MIT
"""The parts of bench/sidebyside.py: the problems (rows.py), the contestants (contestants.py), the timing (timing.py) and
errors (errors.py)."""
