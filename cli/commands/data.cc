#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "cli/commands/commands.h"
#include "cli/printer.h"
#include "cli/validators.h"
#include "jobspec/fields/text.h"
#include "worker/data/pack/pack_folder.h"

namespace ringleader::cli {
namespace {

nlohmann::ordered_json ToJson(const data::Manifest& manifest) {
  return {{"tokens", manifest.tokens},
          {"documents", manifest.documents},
          {"shards", manifest.shards.size()}};
}

absl::StatusOr<int> Pack(const Context& context, const data::PackOptions& options) {
  if (!jobspec::IsUtf8(options.tokenizer) || !jobspec::IsUtf8(absl::StrJoin(options.tasks, ","))) {
    return absl::InvalidArgumentError("--tokenizer or --tasks is not UTF-8");
  }
  ASSIGN_OR_RETURN(const data::PackResult result, data::Pack(options));
  const nlohmann::ordered_json document = {
      {"train", ToJson(result.train)},         {"eval", ToJson(result.eval)},
      {"vocabulary", result.train.vocabulary}, {"tasks", result.train.tasks},
      {"skipped_files", result.skipped_files}, {"too_long_files", result.too_long_files},
      {"skipped_links", result.skipped_links}, {"repeated_paths", result.repeated_paths}};
  PrintJson(context, document, [&](std::ostream& out) {
    const auto row = [](const char* name, const data::Manifest& manifest) {
      return std::vector<std::string>{name, FormatCount(static_cast<double>(manifest.tokens)),
                                      FormatCount(static_cast<double>(manifest.documents)),
                                      absl::StrCat(manifest.shards.size())};
    };
    WriteColumns(out, {{"PART", "TOKENS", "DOCUMENTS", "SHARDS"},
                       row("train", result.train),
                       row("eval", result.eval)});
    out << absl::StrFormat("vocabulary %d; %d files left out; in %s\n", result.train.vocabulary,
                           result.skipped_files, options.output);
    if (result.too_long_files > 0) {
      out << absl::StrFormat("%d of these, as %s, are longer than --max-document-bytes (%d)\n",
                             result.too_long_files, result.first_too_long,
                             options.max_document_bytes);
    }
    if (result.skipped_links > 0) {
      out << absl::StrFormat("%d of these, as %s, are links to folders or to nothing\n",
                             result.skipped_links, result.first_skipped_link);
    }
    if (result.repeated_paths > 0) {
      out << absl::StrFormat("%d paths, as %s, lead to files that are packed already\n",
                             result.repeated_paths, result.first_repeated);
    }
  });
  return kOk;
}

}  // namespace

void AddDataCommand(CLI::App& app, Context* context) {
  CLI::App* data = app.add_subcommand("data", "prepare training data");
  data->require_subcommand(1);
  data->fallthrough();
  auto options = std::make_shared<data::PackOptions>();
  CLI::App* pack = data->add_subcommand("pack", "pack text or token ids into folders of shards");
  pack->add_option("--input", options->paths, "file, or folder that is walked; may be repeated")
      ->required()
      ->allow_extra_args(false);
  pack->add_option("--output", options->output, "folder that gets train/ and eval/")->required();
  pack->add_option("--suffix", options->suffixes,
                   "only files in folders that end so; may be repeated")
      ->allow_extra_args(false);
  using Input = data::PackOptions::Input;
  pack->add_option_function<std::string>(
          "--format",
          [options](const std::string& format) {
            options->input = format == "uint16"   ? Input::kUint16
                             : format == "uint32" ? Input::kUint32
                                                  : Input::kText;
          },
          "text (a token a byte), or files of token ids: uint16, uint32")
      ->check(CLI::IsMember({"text", "uint16", "uint32"}));
  pack->add_option("--eval-share", options->eval_share, "share of documents held out")
      ->capture_default_str();
  pack->add_option("--shard-tokens", options->shard_tokens, "tokens in one shard")
      ->check(MoreThanZero())
      ->capture_default_str();
  pack->add_option("--max-document-bytes", options->max_document_bytes, "longer files are left out")
      ->check(MoreThanZero())
      ->capture_default_str();
  pack->add_option("--vocabulary", options->vocabulary, "token ids: how many there are");
  pack->add_option("--separator", options->separator,
                   "token ids: the one that ends a document; required for them");
  pack->add_option("--tokenizer", options->tokenizer, "token ids: name of their tokenizer");
  pack->add_option("--tasks", options->tasks,
                   "token ids: tasks whose answers are marked, separated by commas; beside each "
                   "file FILE lies FILE.marks")
      ->delimiter(',');
  pack->add_option(
      "--prefix-end", options->prefix_end,
      "token id, or byte of text (10: the end of a line), with which each document's "
      "prefix ends: not predicted, and seen as a whole under attention.mask: prefix_lm");
  pack->footer(
      "\nA file is a document; lines of JSON, Parquet and Megatron's indexed files are\n"
      "not read. Documents lie one behind the other, each ended by the\n"
      "separator, and training cuts its sequences from that stream. Attention stays\n"
      "within a document unless a job sets data.document_mask: false; no token is\n"
      "predicted behind a separator. Separators within a file of token ids end\n"
      "documents, too. Links to files are followed, links to folders are not; a file\n"
      "that several inputs or links lead to is packed once.\n"
      "docs/formats.md describes the files.");
  pack->callback([=] { context->action = [=] { return Pack(*context, *options); }; });
}

}  // namespace ringleader::cli
