#include "worker/data/pack_folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/checksum.h"
#include "base/file_lock.h"
#include "base/files.h"
#include "base/status_macros.h"
#include "worker/data/foreign_format.h"

namespace ringleader::data {
namespace {

namespace fs = std::filesystem;

constexpr char kMarksSuffix[] = ".marks";

// A document: what is read, and the name that decides on its order and its share.
struct Source {
  std::string name;  // relative to the path that the user gave
  fs::path file;
  bool is_named = false;    // by the user, himself
  bool is_link = false;     // within a folder
  size_t input = 0;         // which of the user's paths led here
  std::string target = {};  // the same of all paths to a file
  // Of equal names below several inputs, by their whole paths.
  bool operator<(const Source& other) const {
    return std::tie(name, file) < std::tie(other.name, other.file);
  }
};

// FILE.marks beside FILE are read with tasks only: without, they would be lost, or be a document.
absl::Status RefuseMarks(const Source& source) {
  const std::string file(absl::StripSuffix(source.file.string(), kMarksSuffix));
  const std::string marks = file + kMarksSuffix;
  std::error_code error;
  if (!fs::is_regular_file(file, error) || !fs::is_regular_file(marks, error)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s lies beside %s: give --tasks, which reads such marks of token ids, or move them away",
      marks, file));
}

// Of a link: to nothing, or in a circle.
bool LeadsNowhere(const std::error_code& error) {
  return error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory ||
         error == std::errc::too_many_symbolic_link_levels;
}

absl::Status CannotTell(const std::string& path, const std::error_code& error) {
  return absl::UnavailableError(
      absl::StrFormat("cannot tell where %s leads: %s", path, error.message()));
}

// What the user's paths lead to, each file once. `result` counts what does not become a source.
class SourceFinder {
 public:
  SourceFinder(const PackOptions& options, PackResult* result)
      : options_(options), result_(*result) {}

  // In the order of their names.
  absl::StatusOr<std::vector<Source>> Find() {
    for (; input_ < options_.paths.size(); ++input_) {
      const std::string& path = options_.paths[input_];
      std::error_code error;
      const bool is_file = fs::is_regular_file(path, error);
      const std::string name = fs::path(path).filename().string();
      RETURN_IF_ERROR(is_file ? Add({name, path, /*is_named=*/true}) : Walk(path));
    }
    KeepEachOnce();
    for (const Source& source : sources_) {
      if (options_.tasks.empty()) RETURN_IF_ERROR(RefuseMarks(source));
    }
    return std::move(sources_);
  }

 private:
  bool IsWanted(const std::string& name) const {
    if (!options_.tasks.empty() && absl::EndsWith(name, kMarksSuffix)) return false;
    return options_.suffixes.empty() ||
           std::any_of(options_.suffixes.begin(), options_.suffixes.end(),
                       [&](const std::string& suffix) { return absl::EndsWith(name, suffix); });
  }

  absl::Status Add(Source source) {
    std::error_code error;
    source.input = input_;
    source.target = fs::canonical(source.file, error).string();
    if (error) return CannotTell(source.file.string(), error);
    sources_.push_back(std::move(source));
    return absl::OkStatus();
  }

  absl::Status Walk(const std::string& path) {
    std::error_code error;
    fs::recursive_directory_iterator walk(path, error);
    if (error) {
      return absl::InvalidArgumentError(
          absl::StrFormat("cannot read %s: %s", path, error.message()));
    }
    for (; walk != fs::recursive_directory_iterator(); walk.increment(error)) {
      RETURN_IF_ERROR(AddEntry(*walk, path));
    }
    if (!error) return absl::OkStatus();
    // A step that fails ends the walk: what was found so far is not all that is there.
    return absl::UnavailableError(absl::StrFormat(
        "reading %s broke off: %s; pack again once it can be read", path, error.message()));
  }

  // Links are followed to files only: those to folders lead in circles.
  absl::Status AddEntry(const fs::directory_entry& entry, const std::string& path) {
    const std::string name = entry.path().lexically_relative(path).string();
    std::error_code error;
    const bool is_link = entry.is_symlink(error);
    const bool is_file = entry.is_regular_file(error);
    if (is_file && IsWanted(name)) return Add({name, entry.path(), /*is_named=*/false, is_link});
    if (is_file || !is_link || (error && !IsWanted(name))) return absl::OkStatus();
    const std::string link = entry.path().string();
    if (error && !LeadsNowhere(error)) return CannotTell(link, error);
    std::string& first = result_.first_skipped_link;
    if (++result_.skipped_links == 1 || link < first) first = link;
    ++result_.skipped_files;
    return absl::OkStatus();
  }

  // The first input that reaches a file counts, and within it the file before links to it.
  void KeepEachOnce() {
    std::sort(sources_.begin(), sources_.end(), [](const Source& a, const Source& b) {
      return std::tie(a.target, a.input, a.is_link, a.name) <
             std::tie(b.target, b.input, b.is_link, b.name);
    });
    std::vector<Source> once;
    for (const Source& source : sources_) {
      const bool is_new = once.empty() || once.back().target != source.target;
      if (is_new) once.push_back(source);
      once.back().is_named |= source.is_named;
      if (!is_new && ++result_.repeated_paths == 1) result_.first_repeated = source.file.string();
    }
    std::sort(once.begin(), once.end());
    sources_ = std::move(once);
  }

  const PackOptions& options_;
  PackResult& result_;
  size_t input_ = 0;
  std::vector<Source> sources_;
};

// One of the two outputs: collects documents, cuts them into shards.
class FolderWriter {
 public:
  FolderWriter(const PackOptions& options, std::string folder)
      : options_(options),
        folder_(std::move(folder)),
        token_bytes_(options.vocabulary <= UINT16_MAX + 1u ? 2 : 4) {}

  // A file's documents: token ids may hold separators, each of which ends one. The last one's is
  // added where it is missing. `marks`: one a token; none without tasks or prefixes.
  absl::Status Add(std::span<const uint32_t> file, absl::string_view marks) {
    bool begins = true;
    for (const uint32_t token : file) {
      if (begins) starts_.push_back(tokens_.size());
      tokens_.push_back(token);
      begins = token == *options_.separator;
    }
    marks_.insert(marks_.end(), marks.begin(), marks.end());
    if (!begins) {
      tokens_.push_back(*options_.separator);
      if (!options_.tasks.empty()) marks_.push_back(kGivenMark);
      if (options_.prefix_end.has_value()) marks_.push_back(kPlainMark);
    }
    return tokens_.size() >= options_.shard_tokens ? Flush() : absl::OkStatus();
  }

  absl::StatusOr<Manifest> Finish() {
    RETURN_IF_ERROR(Flush());
    manifest_.vocabulary = options_.vocabulary;
    manifest_.separator = *options_.separator;
    manifest_.tokenizer = options_.tokenizer;
    manifest_.tasks = options_.tasks;
    manifest_.prefixes = options_.prefix_end.has_value();
    RETURN_IF_ERROR(WriteManifest(folder_, manifest_));
    return manifest_;
  }

 private:
  absl::Status Flush() {
    if (tokens_.empty()) return absl::OkStatus();
    const std::string name = absl::StrFormat("shard-%05d.tokens", manifest_.shards.size());
    RETURN_IF_ERROR(
        WriteShard(absl::StrCat(folder_, "/", name), tokens_, starts_, token_bytes_, marks_));
    manifest_.shards.push_back(name);
    manifest_.tokens += tokens_.size();
    manifest_.documents += starts_.size();
    tokens_.clear();
    starts_.clear();
    marks_.clear();
    return absl::OkStatus();
  }

  const PackOptions& options_;
  const std::string folder_;
  const uint32_t token_bytes_;
  Manifest manifest_;
  std::vector<uint32_t> tokens_;
  std::vector<uint64_t> starts_;
  std::vector<uint8_t> marks_;
};

template <typename Token>
absl::Status Decode(const std::string& bytes, const Source& source, uint32_t vocabulary,
                    std::vector<uint32_t>* tokens) {
  if (bytes.size() % sizeof(Token) != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: %d bytes do not divide by %d", source.file.string(), bytes.size(), sizeof(Token)));
  }
  tokens->clear();
  for (size_t i = 0; i < bytes.size(); i += sizeof(Token)) {
    Token token;
    std::memcpy(&token, bytes.data() + i, sizeof(Token));
    if (token >= vocabulary) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: token %d at %d is outside the vocabulary of %d",
                          source.file.string(), token, i / sizeof(Token), vocabulary));
    }
    tokens->push_back(token);
  }
  return absl::OkStatus();
}

absl::Status DecodeDocument(const PackOptions& options, const std::string& bytes,
                            const Source& source, std::vector<uint32_t>* tokens) {
  switch (options.input) {
    case PackOptions::Input::kText:
      return Decode<uint8_t>(bytes, source, options.vocabulary, tokens);
    case PackOptions::Input::kUint16:
      return Decode<uint16_t>(bytes, source, options.vocabulary, tokens);
    case PackOptions::Input::kUint32:
      return Decode<uint32_t>(bytes, source, options.vocabulary, tokens);
  }
  return absl::InternalError("unknown input kind");
}

// The marks of `source`, whose content holds `tokens` tokens; none without tasks.
absl::StatusOr<std::string> ReadMarks(const PackOptions& options, const Source& source,
                                      size_t tokens) {
  if (options.tasks.empty()) return std::string();
  const std::string path = source.file.string() + kMarksSuffix;
  ASSIGN_OR_RETURN(std::string marks, ReadFile(path));
  if (marks.size() != tokens) {
    return absl::InvalidArgumentError(absl::StrFormat("%s holds %d marks for the %d tokens of %s",
                                                      path, marks.size(), tokens, source.name));
  }
  const absl::Status known = CheckMarks(
      {reinterpret_cast<const uint8_t*>(marks.data()), marks.size()}, options.tasks.size());
  if (!known.ok()) return absl::InvalidArgumentError(absl::StrCat(path, ": ", known.message()));
  return marks;
}

// The marks of the prefixes of `source`'s documents, which separators within it end, too.
absl::StatusOr<std::string> MarkPrefixes(const PackOptions& options, const Source& source,
                                         std::span<const uint32_t> tokens) {
  std::string marks;
  bool in_prefix = true;
  const auto unended = [&] {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: no token %d (--prefix-end) in the document that ends at its token %d: a prefix ends "
        "with one; add it, or pack without",
        source.file.string(), *options.prefix_end, marks.size()));
  };
  for (const uint32_t token : tokens) {
    const bool is_separator = token == *options.separator;
    if (in_prefix && is_separator) return unended();
    marks.push_back(static_cast<char>(in_prefix ? kGivenMark : kPlainMark));
    in_prefix = is_separator || (in_prefix && token != *options.prefix_end);
  }
  const bool is_after_separator = !tokens.empty() && tokens.back() == *options.separator;
  if (in_prefix && !is_after_separator) return unended();
  return marks;
}

// Empty if it cannot be read, which is found later.
std::string HeadOf(const Source& source) {
  std::string head(size_t{1} << 18, '\0');
  std::ifstream file(source.file, std::ios::binary);
  file.read(head.data(), static_cast<std::streamsize>(head.size()));
  head.resize(static_cast<size_t>(file.gcount()));
  return head;
}

// One pack at a time writes into an output folder.
class PackLock {
 public:
  static absl::StatusOr<PackLock> Take(const fs::path& output) {
    const std::string path = (output / ".packing.lock").string();
    PackLock lock(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
    if (lock.fd_ < 0) return absl::ErrnoToStatus(errno, absl::StrCat("open ", path));
    ASSIGN_OR_RETURN(const bool is_ours, TryLockFile(lock.fd_, path));
    if (is_ours) return lock;
    return absl::UnavailableError(absl::StrFormat(
        "%s: another `ringctl data pack` writes there; wait for its end, or name another folder",
        output.string()));
  }
  PackLock(PackLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  PackLock& operator=(PackLock&&) = delete;
  ~PackLock() {
    if (fd_ >= 0) close(fd_);
  }

 private:
  explicit PackLock(int fd) : fd_(fd) {}
  int fd_;
};

bool IsHeldOut(const Source& source, double share) {
  const uint64_t hash = Checksum(source.name.data(), source.name.size());
  return static_cast<double>(hash >> 11) * 0x1p-53 < share;
}

absl::Status CheckOptions(PackOptions* options) {
  if (options->paths.empty()) return absl::InvalidArgumentError("no input files or folders");
  if (!(options->eval_share >= 0 && options->eval_share < 1)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("eval share is %g; it must be in [0, 1)", options->eval_share));
  }
  if (options->input == PackOptions::Input::kText) {
    if (options->vocabulary != 0 || options->separator.has_value() || !options->tokenizer.empty() ||
        !options->tasks.empty()) {
      return absl::InvalidArgumentError(
          "vocabulary, separator, tokenizer and tasks are for token ids (--format uint16 or "
          "uint32); text is packed a token a byte");
    }
    options->vocabulary = kByteVocabulary;
    options->separator = kByteSeparator;
    options->tokenizer = "bytes";
  } else if (!options->separator.has_value() || *options->separator >= options->vocabulary) {
    // No default would do: 0 is an ordinary token of most tokenizers.
    return absl::InvalidArgumentError(absl::StrFormat(
        "token-id input needs the vocabulary's size and a separator below it; got vocabulary %d, "
        "%s; give --vocabulary and --separator (the tokenizer's end of text)",
        options->vocabulary,
        options->separator ? absl::StrCat("separator ", *options->separator) : "no separator"));
  }
  RETURN_IF_ERROR(CheckTasks(options->tasks));
  if (options->prefix_end.has_value() && !options->tasks.empty()) {
    return absl::InvalidArgumentError(
        "--prefix-end beside --tasks: marks say which tokens are given, and so where a prefix "
        "ends; "
        "give one");
  }
  if (options->prefix_end.has_value() && (*options->prefix_end >= options->vocabulary ||
                                          *options->prefix_end == *options->separator)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--prefix-end %d is none of the tokens below %d (the vocabulary) but %d (the separator)",
        *options->prefix_end, options->vocabulary, *options->separator));
  }
  return absl::OkStatus();
}

absl::Status CheckOutput(const fs::path& output) {
  for (const char* part : {"train", "eval"}) {
    const fs::path folder = output / part;
    std::error_code error;
    const bool is_there = fs::exists(folder, error);
    if (error) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: %s", folder.string(), error.message()));
    }
    if (is_there) {
      return absl::AlreadyExistsError(
          absl::StrFormat("%s exists; choose another output folder or remove it", folder.string()));
    }
  }
  return absl::OkStatus();
}

// For an error: what may be missed where there is no document.
std::string LeftOut(const PackOptions& options, const PackResult& result) {
  std::string text;
  if (result.too_long_files > 0) {
    absl::StrAppendFormat(&text, ", of which %d, as %s, are longer than --max-document-bytes (%d)",
                          result.too_long_files, result.first_too_long, options.max_document_bytes);
  }
  if (result.skipped_links > 0) {
    absl::StrAppendFormat(&text, ", beside %d links to folders or to nothing, as %s",
                          result.skipped_links, result.first_skipped_link);
  }
  return text;
}

}  // namespace

absl::StatusOr<PackResult> Pack(const PackOptions& user_options) {
  PackOptions options = user_options;
  RETURN_IF_ERROR(CheckOptions(&options));
  RETURN_IF_ERROR(CheckOutput(options.output));
  PackResult result;
  ASSIGN_OR_RETURN(const std::vector<Source> sources, SourceFinder(options, &result).Find());

  // Built beside the output and renamed into place, so that a broken-off call leaves nothing that
  // looks whole.
  const fs::path output = options.output;
  std::error_code error;
  fs::create_directories(output, error);
  if (error) {
    return absl::InvalidArgumentError(
        absl::StrFormat("cannot create %s: %s", output.string(), error.message()));
  }
  ASSIGN_OR_RETURN(const PackLock lock, PackLock::Take(output));
  RETURN_IF_ERROR(CheckOutput(output));  // another pack may have ended meanwhile
  const fs::path building = output / ".packing";
  fs::remove_all(building, error);
  for (const char* part : {"train", "eval"}) {
    fs::create_directories(building / part, error);
    if (error) {
      return absl::InvalidArgumentError(
          absl::StrFormat("cannot create %s: %s", (building / part).string(), error.message()));
    }
  }
  const absl::Cleanup clean_up = [&] { fs::remove_all(building, error); };

  FolderWriter train(options, building / "train");
  FolderWriter eval(options, building / "eval");
  std::vector<uint32_t> tokens;
  for (const Source& source : sources) {
    const bool is_text = options.input == PackOptions::Input::kText;
    RETURN_IF_ERROR(RefuseForeignFormat(source.file.string(), HeadOf(source), is_text));
    const uint64_t bytes = fs::file_size(source.file, error);
    if (error) {
      return absl::UnavailableError(
          absl::StrFormat("%s: %s", source.file.string(), error.message()));
    }
    if (bytes > options.max_document_bytes) {
      if (source.is_named) {
        return absl::InvalidArgumentError(
            absl::StrFormat("%s has %d bytes, more than the %d of a document; cut it, or raise "
                            "--max-document-bytes",
                            source.file.string(), bytes, options.max_document_bytes));
      }
      if (++result.too_long_files == 1) result.first_too_long = source.file.string();
      ++result.skipped_files;
      continue;
    }
    if (bytes == 0) {
      ++result.skipped_files;
      continue;
    }
    ASSIGN_OR_RETURN(const std::string content, ReadFile(source.file.string()));
    // A NUL byte marks what is no text: objects and archives that lie among headers.
    if (is_text && content.find('\0') != std::string::npos) {
      ++result.skipped_files;
      continue;
    }
    RETURN_IF_ERROR(DecodeDocument(options, content, source, &tokens));
    ASSIGN_OR_RETURN(const std::string marks, options.prefix_end.has_value()
                                                  ? MarkPrefixes(options, source, tokens)
                                                  : ReadMarks(options, source, tokens.size()));
    RETURN_IF_ERROR((IsHeldOut(source, options.eval_share) ? eval : train).Add(tokens, marks));
  }
  ASSIGN_OR_RETURN(result.train, train.Finish());
  ASSIGN_OR_RETURN(result.eval, eval.Finish());
  if (result.train.documents == 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "found no document to train on among %d files%s; check the paths and suffixes",
        sources.size(), LeftOut(options, result)));
  }
  if (options.eval_share > 0 && result.eval.documents == 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "none of %d documents was held out: a file is held out whole, and a share of %g is picked "
        "by path; cut the text into more files, hold out more (--eval-share), or nothing "
        "(--eval-share 0)",
        result.train.documents, options.eval_share));
  }
  for (const char* part : {"train", "eval"}) {
    fs::rename(building / part, output / part, error);
    if (error) {
      fs::remove_all(output / "train", error);
      return absl::UnknownError(absl::StrCat("cannot move the shards to ", output.string()));
    }
  }
  return result;
}

}  // namespace ringleader::data
