# What links Abseil gets its static libraries: a wheel brings no libraries of Debian's along, and what it holds of them
# stays hidden.
get_property(targets DIRECTORY PROPERTY IMPORTED_TARGETS)
foreach(target IN LISTS targets)
  if(target MATCHES "^absl::")
    get_target_property(type ${target} TYPE)
    if(type STREQUAL "SHARED_LIBRARY")
      get_target_property(library ${target} IMPORTED_LOCATION_NONE)
      string(REGEX REPLACE "\\.so[.0-9]*$" ".a" library "${library}")
      set_target_properties(${target} PROPERTIES IMPORTED_LOCATION_NONE ${library})
    endif()
  endif()
endforeach()
