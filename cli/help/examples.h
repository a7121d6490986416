// Examples for --help.
#pragma once

namespace CLI {
class App;
}

namespace ringleader::cli {

// Puts examples after what each command of `app` says in its help already.
void AddExamples(CLI::App& app);

}  // namespace ringleader::cli
