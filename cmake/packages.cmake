# `cmake --install` and the Debian packages that deploy/package.sh builds: ringleader-cli (ringctl), ringleader-coordinator,
# and ringleader-worker (the daemon, the trainer and what `ringctl bench` starts, with the libraries of LibTorch that they load on CPUs).

include(GNUInstallDirs)
# CPack installs under /usr; configuration and units have places of their own.
set(units lib/systemd/system)
set(private_libraries lib/ringleader)

install(TARGETS ringctl COMPONENT cli)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR}
  COMPONENT cli)

install(TARGETS ringleader-coordinator COMPONENT coordinator)
install(FILES ${PROJECT_SOURCE_DIR}/deploy/systemd/ringleader-coordinator.service DESTINATION ${units}
  COMPONENT coordinator)
install(FILES ${PROJECT_SOURCE_DIR}/deploy/systemd/ringleader-coordinator.conf DESTINATION lib/sysusers.d
  COMPONENT coordinator)
install(FILES ${PROJECT_SOURCE_DIR}/deploy/etc/coordinator.yaml DESTINATION /etc/ringleader COMPONENT coordinator)

install(TARGETS ringleader-worker COMPONENT worker)
install(FILES ${PROJECT_SOURCE_DIR}/deploy/systemd/ringleader-worker.service DESTINATION ${units} COMPONENT worker)
install(FILES ${PROJECT_SOURCE_DIR}/deploy/systemd/ringleader-worker.conf DESTINATION lib/sysusers.d COMPONENT worker)
install(FILES ${PROJECT_SOURCE_DIR}/deploy/etc/worker.yaml ${PROJECT_SOURCE_DIR}/deploy/etc/worker.env
  DESTINATION /etc/ringleader COMPONENT worker)
if(RINGLEADER_TORCH)
  # What `ringctl bench` starts comes with the library that it needs.
  set_target_properties(ringleader-trainer ringleader-bench PROPERTIES INSTALL_RPATH "$ORIGIN/../${private_libraries}")
  install(TARGETS ringleader-trainer ringleader-bench COMPONENT worker)
  set(torch_libraries libtorch_cpu.so libc10.so libc10_cuda.so libgomp.so.1)
  list(TRANSFORM torch_libraries PREPEND ${torch_root}/torch/lib/)
  file(GLOB cuda_runtime ${torch_root}/nvidia/cu13/lib/libcudart.so.* ${torch_root}/nvidia/cu13/lib/libcupti.so.*)
  set(bench_programs ${CMAKE_INSTALL_DATADIR}/ringleader/bench)
  install(FILES ${PROJECT_SOURCE_DIR}/bench/figure_rows.py DESTINATION ${bench_programs} COMPONENT worker)
  install(FILES ${PROJECT_SOURCE_DIR}/bench/longca/picture.py DESTINATION ${bench_programs}/longca COMPONENT worker)
  foreach(folder lengths masks rings)
    install(DIRECTORY ${PROJECT_SOURCE_DIR}/bench/longca/${folder} DESTINATION ${bench_programs}/longca COMPONENT worker
      FILES_MATCHING PATTERN "*.py" PATTERN "*.json" PATTERN "__pycache__" EXCLUDE)
  endforeach()
  install(FILES ${torch_libraries} ${cuda_runtime} DESTINATION ${private_libraries} COMPONENT worker)
endif()

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME ringleader)
set(CPACK_PACKAGE_VENDOR Ringleader)
set(CPACK_PACKAGE_CONTACT "The Ringleader authors")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Trains language models on sequences of 100K to 1M tokens")
set(CPACK_PACKAGE_DIRECTORY ${CMAKE_BINARY_DIR}/packages)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_COMPONENTS_ALL cli coordinator worker)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_COMPRESSION_TYPE zstd)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${torch_root}/torch/lib ${torch_root}/nvidia/cu13/lib)
set(CPACK_DEBIAN_CLI_PACKAGE_NAME ringleader-cli)
set(CPACK_DEBIAN_COORDINATOR_PACKAGE_NAME ringleader-coordinator)
set(CPACK_DEBIAN_WORKER_PACKAGE_NAME ringleader-worker)
set(CPACK_COMPONENT_CLI_DESCRIPTION "ringctl submits, follows and plans training jobs.")
set(CPACK_COMPONENT_COORDINATOR_DESCRIPTION "The coordinator keeps jobs, schedules them on workers and balances their work.")
set(CPACK_COMPONENT_WORKER_DESCRIPTION "The worker daemon of a node, and the trainer that it starts for each rank.")
foreach(component COORDINATOR WORKER)
  string(TOLOWER ${component} name)
  set(CPACK_DEBIAN_${component}_PACKAGE_CONTROL_EXTRA ${PROJECT_SOURCE_DIR}/deploy/debian/${name}/postinst
    ${PROJECT_SOURCE_DIR}/deploy/debian/${name}/conffiles)
  set(CPACK_DEBIAN_${component}_PACKAGE_DEPENDS "systemd | systemd-standalone-sysusers")
endforeach()
include(CPack)
