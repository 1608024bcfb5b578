# SPDX-License-Identifier: MIT
"""The parts of fp8_accuracy.py."""
