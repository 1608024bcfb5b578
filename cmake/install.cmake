# SPDX-License-Identifier: MIT
# What is installed, and how programs find it: pkg-config and CMake. Nothing installed names the folder it was built
# in or the prefix it was meant for, so the tree can be staged (DESTDIR), moved, or installed with another --prefix.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Folders given as absolute paths do not move with the tree and stay as given.
set(pc_prefix "${CMAKE_INSTALL_PREFIX}")
if(NOT IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  file(RELATIVE_PATH up "/prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig" /prefix)
  string(REGEX REPLACE "/$" "" up "${up}")
  set(pc_prefix "\${pcfiledir}/${up}")
endif()
set(documents ${CMAKE_INSTALL_DATADIR}/doc/flashmla)
foreach(folder includedir libdir datadir)
  string(TOUPPER ${folder} variable)
  set(pc_${folder} "${CMAKE_INSTALL_${variable}}")
  if(NOT IS_ABSOLUTE "${pc_${folder}}")
    set(pc_${folder} "\${prefix}/${pc_${folder}}")
  endif()
endforeach()

# Users of the archive link its libraries too; with the archive alone those are all users.
set(installed flashmla flashmla_static)
list(JOIN static_needs " " pc_private)
set(pc_public "")
set(only_archive "")
if(no_shared)
  set(installed flashmla_static)
  set(pc_public " ${pc_private}")
  set(only_archive "add_library(flashmla::flashmla ALIAS flashmla::flashmla_static) # built with BUILD_SHARED_LIBS=OFF")
elseif(no_archive)
  set(installed flashmla)
endif()
configure_file(cmake/flashmla.pc.in ${PROJECT_BINARY_DIR}/install/flashmla.pc @ONLY)

set(package ${CMAKE_INSTALL_LIBDIR}/cmake/flashmla)
configure_package_config_file(cmake/flashmlaConfig.cmake.in ${PROJECT_BINARY_DIR}/install/flashmlaConfig.cmake
  INSTALL_DESTINATION ${package} PATH_VARS documents NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/install/flashmlaConfigVersion.cmake
  COMPATIBILITY ${interface_compatibility})

install(TARGETS ${installed} EXPORT flashmlaTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES include/flashmla/flashmla.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/flashmla)
install(FILES ${PROJECT_BINARY_DIR}/install/flashmla.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(EXPORT flashmlaTargets NAMESPACE flashmla:: DESTINATION ${package})
install(FILES ${PROJECT_BINARY_DIR}/install/flashmlaConfig.cmake
  ${PROJECT_BINARY_DIR}/install/flashmlaConfigVersion.cmake DESTINATION ${package})
# The command contains the archive, so it runs anywhere without a library search path.
if(FMLA_TOOLS)
  install(TARGETS flashmla_cmd RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  list(APPEND installed flashmla_cmd)
endif()
# The definition of all results, and what it links to.
install(FILES LICENSE docs/semantics.md docs/fp8-accuracy.md docs/fp8-accuracy.svg DESTINATION ${documents})

# The command generates these files from its table of options. Builds with sanitizers are not installed, and a cross
# build may have no way to run the command.
if(FMLA_TOOLS AND NOT FMLA_SANITIZE AND (NOT CMAKE_CROSSCOMPILING OR CMAKE_CROSSCOMPILING_EMULATOR))
  macro(install_help form name destination)
    set(file ${PROJECT_BINARY_DIR}/install/${form}/${name})
    file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/install/${form})
    add_custom_command(OUTPUT ${file}
      COMMAND sh -c "to=$1; shift; exec \"$@\" >\"$to\"" sh ${file}
        ${CMAKE_CROSSCOMPILING_EMULATOR} $<TARGET_FILE:flashmla_cmd> help --as ${form}
      DEPENDS flashmla_cmd VERBATIM)
    add_custom_target(flashmla_help_${form} ALL DEPENDS ${file})
    install(FILES ${file} DESTINATION ${destination})
    list(APPEND installed flashmla_help_${form})
  endmacro()
  install_help(man flashmla.1 ${CMAKE_INSTALL_MANDIR}/man1)
  install_help(bash flashmla ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
  install_help(zsh _flashmla ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
endif()

# What make builds: all that is installed, without tests and examples.
add_custom_target(flashmla_product DEPENDS ${installed})
if(TARGET fmla_kernel_report)
  add_dependencies(flashmla_product fmla_kernel_report)
endif()
