// A plugin for clang-tidy, which tests/lint.sh builds: checks walk the declarations of this
// repository and leave out those of system headers, which are nearly all there is in a source that
// includes LibTorch or gRPC, take most of the time and have findings that nobody is told. What is
// found stays the same but for bugprone-forward-declaration-namespace, which no longer compares our
// names with those of other projects.
#include <memory>
#include <string>
#include <vector>

#include "clang/AST/ASTConsumer.h"
#include "clang/AST/ASTContext.h"
#include "clang/Basic/SourceManager.h"
#include "clang/Frontend/CompilerInstance.h"
#include "clang/Frontend/FrontendAction.h"
#include "clang/Frontend/FrontendPluginRegistry.h"

namespace {

class OwnDeclarations : public clang::ASTConsumer {
 public:
  bool HandleTopLevelDecl(clang::DeclGroupRef group) override {
    for (clang::Decl* declaration : group) {
      const clang::SourceManager& sources = declaration->getASTContext().getSourceManager();
      if (!sources.isInSystemHeader(sources.getExpansionLoc(declaration->getLocation()))) {
        own_.push_back(declaration);
      }
    }
    return true;
  }

  void HandleTranslationUnit(clang::ASTContext& context) override {
    context.setTraversalScope(own_);
  }

 private:
  std::vector<clang::Decl*> own_;
};

class Scope : public clang::PluginASTAction {
 protected:
  std::unique_ptr<clang::ASTConsumer> CreateASTConsumer(clang::CompilerInstance& /*compiler*/,
                                                        llvm::StringRef /*file*/) override {
    return std::make_unique<OwnDeclarations>();
  }
  bool ParseArgs(const clang::CompilerInstance& /*compiler*/,
                 const std::vector<std::string>& /*arguments*/) override {
    return true;
  }
  // Ahead of clang-tidy's own consumer, which walks what it finds in scope.
  ActionType getActionType() override { return AddBeforeMainAction; }
};

const clang::FrontendPluginRegistry::Add<Scope> kScope("lint-scope",
                                                       "confines checks to this repository");

}  // namespace
