# SPDX-License-Identifier: MIT
"""The wrapper files of inference engines, on this package: an engine imports one of these modules in place of its own file.

flash_mla.compat.vllm and flash_mla.compat.sglang have the functions of those files with their names, arguments and defaults.
docs/engines.md says which import of which version changes.
"""
