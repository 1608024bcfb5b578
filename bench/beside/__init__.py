# SPDX-License-Identifier: MIT
"""What bench/sidebyside.py times (rows.py), whose calls (contestants.py), and how (timing.py)."""
