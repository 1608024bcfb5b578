# SPDX-License-Identifier: MIT
# Installs the library for the Python package, component `python`: one file beside the modules, with the name that
# python/flash_mla/_library.py opens, without debugging information. A wheel has no links; the soname stays, so that
# other libraries of the process that need it get this one.
target_link_options(flashmla PRIVATE -s)
set_target_properties(flashmla PROPERTIES SKIP_BUILD_RPATH ON) # the wheel contains the build's file unchanged
install(PROGRAMS $<TARGET_FILE:flashmla> DESTINATION flash_mla RENAME libflashmla.so COMPONENT python)
