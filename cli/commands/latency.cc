#include <CLI/CLI.hpp>
#include <memory>
#include <ostream>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/status_macros.h"
#include "cli/client.h"
#include "cli/commands/commands.h"
#include "cli/printer.h"

namespace ringleader::cli {
namespace {

// RFC 4180: a field in quotes, quotes doubled.
std::string Quoted(const std::string& text) {
  return "\"" + absl::StrReplaceAll(text, {{"\"", "\"\""}}) + "\"";
}

// A line a measured point, for spreadsheets and notebooks; links are in the other forms alone.
void WriteCsv(std::ostream& out, const v1::ListLatencyResponse& measured) {
  out << "device,clocks,driver,build,pattern,tile,heads,kv_heads,head_dim,tokens,document_tokens,"
         "density,p50_ms,p90_ms,forward_p50_ms\n";
  for (const v1::LatencyTable& table : measured.tables()) {
    const v1::MachineKind& machine = table.machine();
    const v1::LatencyShape& shape = table.shape();
    for (const v1::LatencyRow& row : table.rows()) {
      out << absl::StrFormat("%s,%s,%s,%s,%s,%d,%d,%d,%d,%d,%d,%.9g,%.9g,%.9g,%.9g\n",
                             Quoted(machine.device()), Quoted(machine.clocks()),
                             Quoted(machine.driver()), Quoted(machine.build()), shape.pattern(),
                             shape.tile(), shape.heads(), shape.kv_heads(), shape.head_dim(),
                             row.tokens(), row.document_tokens(), row.density(), row.p50_ms(),
                             row.p90_ms(), row.forward_p50_ms());
    }
  }
}

void WriteTables(std::ostream& out, const v1::ListLatencyResponse& measured) {
  if (measured.tables().empty() && measured.links().empty()) {
    out << "nothing has been measured yet: the first attempt on a machine does\n";
  }
  for (const v1::LatencyTable& table : measured.tables()) {
    const v1::MachineKind& machine = table.machine();
    const v1::LatencyShape& shape = table.shape();
    // A CPU has no clocks that were asked for.
    std::vector<std::string> which = {machine.clocks(), machine.driver(), machine.build()};
    std::erase(which, "");
    out << absl::StrFormat("%s, tile %d, %d/%d heads of %d, one layer on one %s (%s)\n",
                           shape.pattern(), shape.tile(), shape.heads(), shape.kv_heads(),
                           shape.head_dim(), machine.device(), absl::StrJoin(which, "; "));
    std::vector<std::vector<std::string>> rows = {
        {"TOKENS", "DOCUMENTS", "DENSITY", "P50 MS", "P90 MS", "FORWARD MS"}};
    for (const v1::LatencyRow& row : table.rows()) {
      rows.push_back(
          {FormatCount(static_cast<double>(row.tokens())),
           row.document_tokens() == 0 ? "one"
                                      : FormatCount(static_cast<double>(row.document_tokens())),
           FormatPercent(row.density()), absl::StrFormat("%.4g", row.p50_ms()),
           absl::StrFormat("%.4g", row.p90_ms()), absl::StrFormat("%.4g", row.forward_p50_ms())});
    }
    WriteColumns(out, rows);
  }
  for (const v1::LinkSpeed& link : measured.links()) {
    out << absl::StrFormat("%s, %s: %.4g GB/s after %.4g µs\n",
                           link.between_nodes() ? "between nodes" : "inside a node",
                           link.machine().device(), link.bytes_per_second() / 1e9,
                           link.latency_seconds() * 1e6);
  }
}

absl::StatusOr<int> Latency(const Context& context, bool csv) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  ASSIGN_OR_RETURN(const v1::ListLatencyResponse measured, client->ListLatency());
  if (csv) {
    WriteCsv(context.out, measured);
  } else {
    Print(context, measured, [&](std::ostream& out) { WriteTables(out, measured); });
  }
  return kOk;
}

}  // namespace

void AddLatencyCommand(CLI::App& app, Context* context) {
  auto csv = std::make_shared<bool>(false);
  CLI::App* command = app.add_subcommand(
      "latency", "what trainers measured of attention and links (docs/latency.md)");
  command->add_flag("--csv", *csv, "a line a measured point");
  command->callback([=] { context->action = [=] { return Latency(*context, *csv); }; });
}

}  // namespace ringleader::cli
