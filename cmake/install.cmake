# SPDX-License-Identifier: MIT
# What is installed, and how programs find it: pkg-config and CMake. Nothing installed names the folder it was built
# in or the prefix it was meant for, so the tree can be staged (DESTDIR), moved, or installed with another --prefix.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Libraries that users of the archive link too.
set(static_needs -pthread -lm -ldl)
list(JOIN static_needs " " pc_private)

# Folders given as absolute paths do not move with the tree and stay as given.
set(pc_prefix "${CMAKE_INSTALL_PREFIX}")
if(NOT IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  file(RELATIVE_PATH up "/prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig" /prefix)
  string(REGEX REPLACE "/$" "" up "${up}")
  set(pc_prefix "\${pcfiledir}/${up}")
endif()
foreach(folder includedir libdir)
  string(TOUPPER ${folder} variable)
  set(pc_${folder} "${CMAKE_INSTALL_${variable}}")
  if(NOT IS_ABSOLUTE "${pc_${folder}}")
    set(pc_${folder} "\${prefix}/${pc_${folder}}")
  endif()
endforeach()
configure_file(cmake/flashmla.pc.in ${CMAKE_BINARY_DIR}/install/flashmla.pc @ONLY)

set(package ${CMAKE_INSTALL_LIBDIR}/cmake/flashmla)
configure_package_config_file(cmake/flashmlaConfig.cmake.in ${CMAKE_BINARY_DIR}/install/flashmlaConfig.cmake
  INSTALL_DESTINATION ${package} PATH_VARS CMAKE_INSTALL_LIBDIR CMAKE_INSTALL_INCLUDEDIR
  NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/install/flashmlaConfigVersion.cmake
  COMPATIBILITY ${interface_compatibility})

install(TARGETS flashmla EXPORT flashmlaTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${static_library} DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES include/flashmla/flashmla.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/flashmla)
install(FILES ${CMAKE_BINARY_DIR}/install/flashmla.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(EXPORT flashmlaTargets NAMESPACE flashmla:: DESTINATION ${package})
install(FILES ${CMAKE_BINARY_DIR}/install/flashmlaConfig.cmake
  ${CMAKE_BINARY_DIR}/install/flashmlaConfigVersion.cmake DESTINATION ${package})
# The command contains the archive, so it runs anywhere without a library search path.
if(FMLA_TOOLS)
  install(TARGETS flashmla_cmd RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/flashmla)

# The command generates these files from its table of options. Builds with sanitizers are not installed, and a cross
# build may have no way to run the command.
if(FMLA_TOOLS AND NOT FMLA_SANITIZE AND (NOT CMAKE_CROSSCOMPILING OR CMAKE_CROSSCOMPILING_EMULATOR))
  function(install_help form name destination)
    set(file ${CMAKE_BINARY_DIR}/install/${form}/${name})
    file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/install/${form})
    add_custom_command(OUTPUT ${file}
      COMMAND sh -c "to=$1; shift; exec \"$@\" >\"$to\"" sh ${file}
        ${CMAKE_CROSSCOMPILING_EMULATOR} $<TARGET_FILE:flashmla_cmd> help --as ${form}
      DEPENDS flashmla_cmd VERBATIM)
    add_custom_target(flashmla_help_${form} ALL DEPENDS ${file})
    install(FILES ${file} DESTINATION ${destination})
  endfunction()
  install_help(man flashmla.1 ${CMAKE_INSTALL_MANDIR}/man1)
  install_help(bash flashmla ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
  install_help(zsh _flashmla ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
endif()
