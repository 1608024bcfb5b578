# SPDX-License-Identifier: MIT
"""Replacements for the wrapper files of inference engines: an engine imports one of these modules in place of its own file.

flash_mla.compat.vllm and flash_mla.compat.sglang have the functions of those files with their names, arguments and defaults.
docs/engines.md lists the imports to change in each version.
"""
