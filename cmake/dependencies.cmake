# Third-party libraries. Debian packages come through find_package; LibTorch is the PyPI wheel that
# deploy/install_deps.sh unpacked, used without its CMake package (that one insists on a CUDA toolkit).

find_package(Threads REQUIRED)
find_package(absl CONFIG REQUIRED)
find_package(GTest CONFIG REQUIRED)
if(NOT RINGLEADER_WHEEL)
  find_package(Protobuf MODULE REQUIRED)
  find_package(gRPC CONFIG REQUIRED)
  find_package(spdlog CONFIG REQUIRED)
  find_package(yaml-cpp CONFIG REQUIRED)
  find_package(nlohmann_json CONFIG REQUIRED)
  find_package(CLI11 CONFIG REQUIRED)
  find_package(SQLiteCpp CONFIG REQUIRED)
  find_package(prometheus-cpp CONFIG REQUIRED)
  find_package(OpenSSL REQUIRED)

  # Debian's cpp-httplib has no CMake package; its header must be seen with what its library was built with.
  find_library(HTTPLIB_LIBRARY cpp-httplib REQUIRED)
  find_path(HTTPLIB_INCLUDE_DIR httplib.h REQUIRED)
  add_library(ringleader_httplib INTERFACE)
  target_include_directories(ringleader_httplib SYSTEM INTERFACE ${HTTPLIB_INCLUDE_DIR})
  target_compile_definitions(ringleader_httplib INTERFACE
    CPPHTTPLIB_OPENSSL_SUPPORT CPPHTTPLIB_ZLIB_SUPPORT CPPHTTPLIB_BROTLI_SUPPORT)
  target_link_libraries(ringleader_httplib INTERFACE ${HTTPLIB_LIBRARY} OpenSSL::SSL Threads::Threads)
endif()

if(RINGLEADER_TORCH)
  if(DEFINED ENV{RINGLEADER_DEPS})
    set(default_torch $ENV{RINGLEADER_DEPS}/torch)
  elseif(DEFINED ENV{XDG_CACHE_HOME})
    set(default_torch $ENV{XDG_CACHE_HOME}/ringleader/deps/torch)
  else()
    set(default_torch $ENV{HOME}/.cache/ringleader/deps/torch)
  endif()
  set(RINGLEADER_TORCH_ROOT ${default_torch} CACHE PATH "site-packages folder that holds torch/")
  get_filename_component(torch_root ${RINGLEADER_TORCH_ROOT} REALPATH)
  if(NOT EXISTS ${torch_root}/torch/lib/libtorch_cpu.so)
    message(FATAL_ERROR "LibTorch not found in ${RINGLEADER_TORCH_ROOT}; run deploy/install_deps.sh "
                        "or set RINGLEADER_TORCH_ROOT")
  endif()
  add_library(ringleader_torch INTERFACE)
  target_include_directories(ringleader_torch SYSTEM INTERFACE
    ${torch_root}/torch/include ${torch_root}/torch/include/torch/csrc/api/include)
  target_compile_definitions(ringleader_torch INTERFACE _GLIBCXX_USE_CXX11_ABI=1)
  target_link_libraries(ringleader_torch INTERFACE
    ${torch_root}/torch/lib/libtorch_cpu.so ${torch_root}/torch/lib/libc10.so)
  target_link_options(ringleader_torch INTERFACE
    -Wl,-rpath-link,${torch_root}/nvidia/cu13/lib)

  # Tensors cost a quarter of a minute to parse: once here, then every TORCH target reuses it. torch/torch.h, which
  # brings torch::nn and more that nothing here uses, would be 1.5 times as large, and cost each source 3 seconds more.
  file(WRITE ${CMAKE_BINARY_DIR}/torch_pch/torch_pch.cc "")
  add_library(ringleader_torch_pch OBJECT ${CMAKE_BINARY_DIR}/torch_pch/torch_pch.cc)
  target_link_libraries(ringleader_torch_pch PUBLIC ringleader_options ringleader_torch)
  target_precompile_headers(ringleader_torch_pch PRIVATE <torch/types.h> <torch/utils.h>)
endif()

function(ringleader_use_torch target)
  target_link_libraries(${target} PUBLIC ringleader_torch)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    # The precompiled header is built as -fPIC; what CMake gives executables, -fPIE, does not fit it.
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  target_precompile_headers(${target} REUSE_FROM ringleader_torch_pch)
endfunction()

if(RINGLEADER_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  set(RINGLEADER_CUDA_ENABLED ${CMAKE_CUDA_COMPILER})
else()
  set(RINGLEADER_CUDA_ENABLED ${RINGLEADER_CUDA})
endif()
if(RINGLEADER_CUDA_ENABLED)
  set(CMAKE_CUDA_ARCHITECTURES 90a)
  set(CMAKE_CUDA_STANDARD 20)
  enable_language(CUDA)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc speaks C++20
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  find_package(CUDAToolkit REQUIRED)
  if(NOT RINGLEADER_WHEEL)
    # Headers only: trainers load libnccl.so.2 when they start on GPUs.
    find_path(NCCL_INCLUDE_DIR nccl.h
      HINTS ${torch_root}/nvidia/nccl/include ${CUDAToolkit_INCLUDE_DIRS} REQUIRED)
  endif()
endif()
