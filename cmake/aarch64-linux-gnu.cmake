# SPDX-License-Identifier: MIT
# Cross-compiles for 64-bit ARM with the packages of Debian and Ubuntu: gcc-aarch64-linux-gnu, and libc6-dev-arm64-cross
# for the C library. Programs run under qemu's user emulation.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)

set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

# -L: the folder of the other machine's loader and libraries.
find_program(FMLA_QEMU_AARCH64 NAMES qemu-aarch64-static qemu-aarch64)
if(FMLA_QEMU_AARCH64)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${FMLA_QEMU_AARCH64} -L /usr/aarch64-linux-gnu)
endif()
