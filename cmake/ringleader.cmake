# Compiler settings and the functions that every folder uses to declare its targets.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
# Assertions stay on: a violated invariant must stop the process, not corrupt a run.
set(CMAKE_CXX_FLAGS_RELEASE "-O2")
if(RINGLEADER_SANITIZE)
  # What reports need and no more: compiles in well under half the time of -O2 -g.
  set(CMAKE_CXX_FLAGS_RELEASE "-O1 -g1")
endif()

find_program(CCACHE ccache)
if(CCACHE)
  # Paths relative to the checkout, so that clones share cache entries; PCH needs the sloppiness.
  set(launcher ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${launcher})
endif()

add_library(ringleader_options INTERFACE)
target_include_directories(ringleader_options INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(ringleader_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror -Wno-unused-parameter>)
if(RINGLEADER_SANITIZE)
  target_compile_options(ringleader_options INTERFACE
    -fsanitize=${RINGLEADER_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all
    # gcc 12 sees unset values in instrumented code where there are none.
    -Wno-error=maybe-uninitialized)
  target_link_options(ringleader_options INTERFACE -fsanitize=${RINGLEADER_SANITIZE})
  target_compile_definitions(ringleader_options INTERFACE RINGLEADER_SANITIZED)
  if(RINGLEADER_SANITIZE STREQUAL "thread")
    # protobuf's map fields have another layout where this is defined, and Debian's library was built without.
    target_compile_options(ringleader_options INTERFACE -U__SANITIZE_THREAD__)
  endif()
endif()

# ringleader_refuse_spills(SOURCE.cu ...): a kernel whose registers spill is an error of CUDA 13.0's assembler, with which they are
# tuned, and a warning of others, which share registers out in their own way.
function(ringleader_refuse_spills)
  set(options -Xptxas=--warn-on-spills)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0 AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.1)
    list(APPEND options -Xptxas=--warning-as-error)
  endif()
  set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS "${options}")
endfunction()

# ringleader_library(NAME SOURCES ... [DEPS ...] [TORCH])
#   A static library named ringleader_NAME. TORCH: links LibTorch and reuses its precompiled header.
function(ringleader_library name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;DEPS" ${ARGN})
  add_library(ringleader_${name} STATIC ${ARG_SOURCES})
  target_link_libraries(ringleader_${name} PUBLIC ringleader_options ${ARG_DEPS})
  if(ARG_TORCH)
    ringleader_use_torch(ringleader_${name})
  endif()
endfunction()

# ringleader_binary(NAME SOURCES ... [DEPS ...] [TORCH])
#   An executable bin/NAME.
function(ringleader_binary name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ringleader_options ${ARG_DEPS})
  if(ARG_TORCH)
    ringleader_use_torch(${name})
  endif()
endfunction()

# ringleader_test(NAME SOURCES ... [DEPS ...] [TORCH] [ENVIRONMENT ...] [LABELS ...])
#   One GoogleTest binary per folder, one ctest entry per binary: linking is the cost here.
function(ringleader_test name)
  cmake_parse_arguments(ARG "TORCH;SERIAL" "" "SOURCES;DEPS;ENVIRONMENT;LABELS" ${ARGN})
  ringleader_binary(${name} SOURCES ${ARG_SOURCES} DEPS ${ARG_DEPS} GTest::gmock_main)
  if(ARG_TORCH)
    ringleader_use_torch(${name})
  endif()
  add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  # Ends a test that hangs, and no other: beside a second suite a test of one minute takes five.
  set(timeout 1200)
  if(RINGLEADER_SANITIZE)
    math(EXPR timeout "${timeout} * 4")
  endif()
  # OpenMP's threads wait for each other without a core: on a busy machine those that spin take a
  # test of seconds beyond its time-out.
  set(ARG_ENVIRONMENT OMP_WAIT_POLICY=PASSIVE ${ARG_ENVIRONMENT})
  # A binary whose every test was skipped, for want of a GPU, is not one that passed.
  set_tests_properties(${name} PROPERTIES TIMEOUT ${timeout} LABELS "${ARG_LABELS}"
    ENVIRONMENT "${ARG_ENVIRONMENT}" SKIP_REGULAR_EXPRESSION "\\[  PASSED  \\] 0 tests\\.")
  if(ARG_SERIAL)
    set_tests_properties(${name} PROPERTIES RUN_SERIAL TRUE)
  endif()
endfunction()

# ringleader_gpu_binary(NAME ...)
#   Tests and benches that deploy/bundle.sh takes to a GPU machine.
function(ringleader_gpu_binary)
  set_property(GLOBAL APPEND PROPERTY RINGLEADER_GPU_BINARIES ${ARGV})
endfunction()
