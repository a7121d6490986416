// RETURN_IF_ERROR and ASSIGN_OR_RETURN: hand a failed absl::Status to the caller.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define RINGLEADER_CONCAT_INNER(a, b) a##b
#define RINGLEADER_CONCAT(a, b) RINGLEADER_CONCAT_INNER(a, b)

// Evaluates `expression` (an absl::Status) once; returns it from the enclosing function unless ok.
#define RETURN_IF_ERROR(expression)                                                         \
  do {                                                                                      \
    if (absl::Status return_if_error_status = (expression); !return_if_error_status.ok()) { \
      return return_if_error_status;                                                        \
    }                                                                                       \
  } while (false)

// ASSIGN_OR_RETURN(auto x, F()): x = *F(), or returns F's status from the enclosing function.
#define ASSIGN_OR_RETURN(declaration, expression) \
  ASSIGN_OR_RETURN_INNER(RINGLEADER_CONCAT(status_or_, __LINE__), declaration, expression)

// NOLINTBEGIN(bugprone-macro-parentheses): a name and a declaration take none.
#define ASSIGN_OR_RETURN_INNER(status_or, declaration, expression) \
  auto status_or = (expression);                                   \
  if (!status_or.ok()) return std::move(status_or).status();       \
  declaration = *std::move(status_or)
// NOLINTEND(bugprone-macro-parentheses)
