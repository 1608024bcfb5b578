# SPDX-License-Identifier: MIT
# The library as the Python package bundles it, component `python`: one file beside the modules, under the name that
# python/flash_mla/_library.py opens, without debugging information. A wheel has no links; the soname stays, so that another
# library of the process that asks for it is given this one.
target_link_options(flashmla PRIVATE -s)
set_target_properties(flashmla PROPERTIES SKIP_BUILD_RPATH ON) # the file is taken from the build as it is
install(FILES ${CMAKE_SOURCE_DIR}/src/operations.def DESTINATION flash_mla COMPONENT python)
install(PROGRAMS $<TARGET_FILE:flashmla> DESTINATION flash_mla RENAME libflashmla.so COMPONENT python)
