# SPDX-License-Identifier: MIT
# Compiles each .cu file into a fatbin (compressed machine code for several GPUs), embedded by .incbin.
# Makes the object library fmla_images; without nvcc that is an empty table. Sets FMLA_KERNEL_REPORT to the list of the
# kernels with their registers and spills, or to nothing; kernels.sha256 beside it has the hashes of their machine code.

# Makes a cache variable that the environment sets too. A folder keeps its choice until either of them names another one, so
# that `FMLA_CUDA=OFF make` and then `make test` build the same. In a folder's first configuration -D wins.
function(cuda_choice name default help)
  set(asked "$ENV{${name}}")
  set(chosen "${${name}}")
  if("${chosen}" STREQUAL "")
    set(chosen "${asked}")
  elseif(DEFINED ${name}_ASKED AND NOT "${asked}" STREQUAL "${${name}_ASKED}" AND NOT "${asked}" STREQUAL "")
    set(chosen "${asked}")
  endif()
  if("${chosen}" STREQUAL "")
    set(chosen ${default})
  endif()
  set(${name} "${chosen}" CACHE STRING "${help}" FORCE)
  set(${name}_ASKED "${asked}" CACHE INTERNAL "what the environment said last")
endfunction()
cuda_choice(FMLA_CUDA AUTO "Kernels for NVIDIA GPUs: AUTO (where a working nvcc is found), ON, OFF")
set_property(CACHE FMLA_CUDA PROPERTY STRINGS AUTO ON OFF)
cuda_choice(FMLA_CUDA_ARCHS native
  "Compute capabilities to make machine code for, as 80;90a; all; native: of this machine's GPUs, 90 where there is none")

# All .cu files; those for Hopper alone (90a) are omitted if 9.0 is not among the GPUs.
file(GLOB cuda_images_any CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/src/cuda src/cuda/any/*.cu src/cuda/sm80/*/*.cu)
file(GLOB_RECURSE cuda_images_sm90 CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/src/cuda src/cuda/sm90/*.cu)
list(TRANSFORM cuda_images_any REPLACE "\\.cu$" "")
list(TRANSFORM cuda_images_sm90 REPLACE "\\.cu$" "")

# Sets `why` to what is wrong with nvcc, or to nothing.
function(cuda_probe why)
  set(${why} "" PARENT_SCOPE)
  set(probe ${PROJECT_BINARY_DIR}/cuda/probe)
  if(NOT FMLA_NVCC)
    set(${why} "no nvcc found (CUDACXX or CUDA_HOME may say where it is)" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND ${FMLA_NVCC} --version OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(NOT text MATCHES "release ([0-9]+)\\.([0-9]+)")
    set(${why} "${FMLA_NVCC} does not tell its version" PARENT_SCOPE)
    return()
  endif()
  math(EXPR version "${CMAKE_MATCH_1} * 1000 + ${CMAKE_MATCH_2} * 10")
  set(cuda_version ${version} PARENT_SCOPE)
  if(version LESS 12000)
    set(${why} "${FMLA_NVCC} is of CUDA ${CMAKE_MATCH_1}.${CMAKE_MATCH_2}, 12.0 or later is needed" PARENT_SCOPE)
    return()
  endif()
  if(NOT FMLA_NVCC_WORKS STREQUAL "${FMLA_NVCC} ${version}") # it needs a C++ compiler that it supports
    file(WRITE ${probe}.cu "__global__ void probe() {}\n")
    execute_process(COMMAND ${FMLA_NVCC} -std=c++17 -fatbin -o ${probe}.fatbin ${probe}.cu
      RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text)
    if(NOT result EQUAL 0)
      set(${why} "${FMLA_NVCC} does not work here: ${text}" PARENT_SCOPE)
      return()
    endif()
    set(FMLA_NVCC_WORKS "${FMLA_NVCC} ${version}" CACHE INTERNAL "")
  endif()
endfunction()

# Sets `archs` to those compute capabilities of this machine's GPUs that nvcc and the kernels support. Without any: 90,
# with Hopper's kernels, and PTX for later GPUs.
function(cuda_native archs known)
  find_program(nvidia_smi nvidia-smi PATHS /usr/lib/wsl/lib NO_CACHE)
  set(said "")
  if(nvidia_smi)
    execute_process(COMMAND ${nvidia_smi} --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE said ERROR_QUIET TIMEOUT 60)
  endif()
  set(found "")
  string(REGEX MATCHALL "[0-9]+\\.[0-9]" said "${said}")
  foreach(capability IN LISTS said)
    string(REPLACE "." "" number ${capability})
    if(number IN_LIST known AND number GREATER_EQUAL 80)
      list(APPEND found ${number})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES found)
  list(SORT found COMPARE NATURAL)
  if(NOT found)
    set(found 90)
  endif()
  set(${archs} ${found} PARENT_SCOPE)
endfunction()

set(cuda_missing "FMLA_CUDA is OFF")
if(FMLA_CUDA)
  find_program(FMLA_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin PATHS /usr/local/cuda/bin)
  if(DEFINED ENV{CUDACXX})
    set(FMLA_NVCC $ENV{CUDACXX})
  endif()
  cuda_probe(cuda_missing)
  if(cuda_missing AND NOT FMLA_CUDA STREQUAL AUTO)
    message(FATAL_ERROR "FMLA_CUDA is ON: ${cuda_missing}")
  endif()
endif()

set(FMLA_KERNEL_REPORT "")
if(cuda_missing)
  message(STATUS "No kernels for NVIDIA GPUs: ${cuda_missing}")
  add_library(fmla_images OBJECT src/cuda/no_images.c)
else()
  # ---- For which GPUs ----------------------------------------------------------------------------------------------
  execute_process(COMMAND ${FMLA_NVCC} --list-gpu-code OUTPUT_VARIABLE cuda_known)
  string(REGEX MATCHALL "[0-9]+[a-z]?" cuda_known "${cuda_known}")
  set(cuda_archs ${FMLA_CUDA_ARCHS})
  if(cuda_archs STREQUAL native)
    cuda_native(cuda_archs "${cuda_known}")
  elseif(cuda_archs STREQUAL all)
    set(cuda_archs "")
    foreach(arch IN ITEMS 80 86 89 90 100 103 120 121)
      if(arch IN_LIST cuda_known) # older compilers do not know the newest of these GPUs
        list(APPEND cuda_archs ${arch})
      endif()
    endforeach()
  endif()
  # Later GPUs get PTX of the highest one without a letter (a letter restricts code to one GPU).
  set(cuda_targets "")
  set(cuda_ptx 0)
  foreach(arch IN LISTS cuda_archs)
    # Some versions of nvcc list 90, not 90a, so only the number is checked.
    string(REGEX MATCH "^[0-9]+" number "${arch}")
    if(NOT number IN_LIST cuda_known OR number LESS 80)
      message(FATAL_ERROR "FMLA_CUDA_ARCHS: ${arch}: must be native, all, or numbers from 80 on that ${FMLA_NVCC} knows: ${cuda_known}")
    endif()
    list(APPEND cuda_targets -gencode arch=compute_${arch},code=sm_${arch})
    if(arch STREQUAL number AND number GREATER cuda_ptx)
      set(cuda_ptx ${number})
    endif()
  endforeach()
  if(cuda_ptx)
    list(APPEND cuda_targets -gencode arch=compute_${cuda_ptx},code=compute_${cuda_ptx})
  endif()
  # Machine code needs a driver of the toolkit's major version; the smaller compression needs that of 12.4.
  math(EXPR cuda_driver "${cuda_version} / 1000 * 1000")
  set(cuda_compress -Xfatbin -compress-all)
  if(cuda_version GREATER_EQUAL 13000)
    set(cuda_compress --compress-mode=size)
  endif()
  list(JOIN cuda_archs " " cuda_archs_text)
  message(STATUS "Kernels for NVIDIA GPUs: ${FMLA_NVCC} (${cuda_version}), machine code for ${cuda_archs_text}, PTX ${cuda_ptx}")

  # ---- One fatbin a file, and the table of them --------------------------------------------------------------------
  set(cuda_folder ${PROJECT_BINARY_DIR}/cuda)
  set(cuda_fatbins "")
  set(cuda_reports "")
  set(cuda_incbins "")
  set(cuda_declarations "")
  set(cuda_rows "")
  set(cuda_count 0)
  set(cuda_images ${cuda_images_any})
  if("90" IN_LIST cuda_archs OR "90a" IN_LIST cuda_archs)
    list(APPEND cuda_images ${cuda_images_sm90})
  endif()
  # Ninja starts in this order. Hopper's files, which take longest, come first, so that no core waits for one at the end.
  list(REVERSE cuda_images)
  foreach(image IN LISTS cuda_images)
    set(image_targets ${cuda_targets})
    if(image IN_LIST cuda_images_sm90)
      set(image_targets -gencode arch=compute_90a,code=sm_90a)
    endif()
    set(source ${PROJECT_SOURCE_DIR}/src/cuda/${image}.cu)
    set(made ${cuda_folder}/${image})
    get_filename_component(folder ${made} DIRECTORY)
    file(MAKE_DIRECTORY ${folder})
    add_custom_command(OUTPUT ${made}.fatbin ${made}.ptxas ${made}.sha256
      COMMAND bash ${PROJECT_SOURCE_DIR}/scripts/nvcc.sh ${made} ${source} ${FMLA_NVCC} -std=c++17 -O3 -fatbin
        ${cuda_compress} ${image_targets}
      DEPENDS ${source} ${PROJECT_SOURCE_DIR}/scripts/nvcc.sh DEPFILE ${made}.d ${cuda_pool}
      COMMENT "Compiling ${image}.cu" VERBATIM)
    list(APPEND cuda_fatbins ${made}.fatbin)
    list(APPEND cuda_reports ${made}.ptxas ${made}.sha256)
    set(symbol cuda_image_${cuda_count})
    string(APPEND cuda_incbins
      "    .balign 64\n    .globl ${symbol}, ${symbol}_end\n    .hidden ${symbol}, ${symbol}_end\n"
      "${symbol}:\n    .incbin \"${made}.fatbin\"\n${symbol}_end:\n")
    string(APPEND cuda_declarations "extern const unsigned char ${symbol}[], ${symbol}_end[];\n")
    string(APPEND cuda_rows "    {\"${image}\", ${symbol}, ${symbol}_end},\n")
    math(EXPR cuda_count "${cuda_count} + 1")
  endforeach()
  configure_file(${CMAKE_CURRENT_LIST_DIR}/images.S.in ${cuda_folder}/images.S @ONLY)
  configure_file(${CMAKE_CURRENT_LIST_DIR}/images.c.in ${cuda_folder}/images.c @ONLY)
  enable_language(ASM)
  # No debugging information: it would name the build's folder.
  set_source_files_properties(${cuda_folder}/images.S PROPERTIES OBJECT_DEPENDS "${cuda_fatbins}" COMPILE_OPTIONS -g0)
  add_library(fmla_images OBJECT ${cuda_folder}/images.S ${cuda_folder}/images.c)

  # ---- Report of each kernel ---------------------------------------------------------------------------------------
  set(FMLA_KERNEL_REPORT ${PROJECT_BINARY_DIR}/kernels.txt)
  set(cuda_hashes ${PROJECT_BINARY_DIR}/kernels.sha256)
  add_custom_command(OUTPUT ${FMLA_KERNEL_REPORT} ${cuda_hashes}
    COMMAND bash ${PROJECT_SOURCE_DIR}/scripts/kernel_report.sh ${cuda_folder} ${FMLA_KERNEL_REPORT}
      ${cuda_hashes} ${FMLA_NVCC}
    DEPENDS ${cuda_reports} ${PROJECT_SOURCE_DIR}/scripts/kernel_report.sh VERBATIM)
  add_custom_target(fmla_kernel_report ALL DEPENDS ${FMLA_KERNEL_REPORT})
endif()
