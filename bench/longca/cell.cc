#include "bench/longca/cell.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace ringleader::bench {

Spread SpreadOf(std::vector<double> values) {
  std::ranges::sort(values);
  const auto at = [&](double share) {
    const double place = share * static_cast<double>(values.size() - 1);
    const auto low = static_cast<size_t>(place);
    const size_t high = std::min(low + 1, values.size() - 1);
    return values[low] + (place - static_cast<double>(low)) * (values[high] - values[low]);
  };
  return {.median = at(0.5), .p20 = at(0.2), .p80 = at(0.8)};
}

double Cell::gflops(int heads, int head_dim) const {
  if (slowest.median <= 0) return 0;
  const double flops = direction == "forward" ? 4.0 : 10.0;
  const double pairs = share * static_cast<double>(tokens) * static_cast<double>(tokens);
  return flops * head_dim * heads * pairs / slowest.median * 1e-6;
}

void SetTimes(std::span<const std::vector<double>> by_rank, Cell* cell) {
  std::vector<double> slowest, mean;
  for (size_t repetition = 0; repetition < by_rank[0].size(); ++repetition) {
    double most = 0, sum = 0;
    for (const std::vector<double>& rank : by_rank) {
      most = std::max(most, rank[repetition]);
      sum += rank[repetition];
    }
    slowest.push_back(most);
    mean.push_back(sum / static_cast<double>(by_rank.size()));
  }
  cell->slowest = SpreadOf(std::move(slowest));
  cell->mean = SpreadOf(std::move(mean));
}

namespace {

// As a field of the table.
std::string Field(const std::string& text) {
  return absl::StrReplaceAll(text, {{",", ";"}, {"\n", " "}});
}

std::string Row(const Cell& cell, const TableFacts& facts, const std::string& date) {
  std::string row = absl::StrCat(cell.mask, ",", cell.choice, ",", cell.scheme, ",", cell.direction,
                                 ",", cell.tokens, ",", cell.ranks, ",", Field(cell.note));
  for (const double value :
       {cell.slowest.median, cell.slowest.p20, cell.slowest.p80, cell.mean.median, cell.mean.p20,
        cell.mean.p80, cell.plan_ms, cell.slowest.median + cell.plan_ms,
        cell.gflops(facts.heads, facts.head_dim), cell.share, cell.mib_moved, cell.mib_whole,
        cell.imbalance, cell.peak_mib, cell.error}) {
    absl::StrAppend(&row, ",", cell.note.empty() ? absl::StrFormat("%.4g", value) : "");
  }
  return absl::StrCat(row, ",", Field(facts.backend), ",", Field(facts.lengths), ",",
                      Field(facts.hardware), ",", Field(facts.commit), ",", date, "\n");
}

// A row of bars for each scheme, choice and direction.
std::string Picture(std::span<const Cell> cells, const TableFacts& facts) {
  constexpr int kStep = 90, kHeight = 150, kLeft = 40;
  std::vector<std::string> masks, charts;
  const auto place_in = [](std::vector<std::string>& names, const std::string& name) {
    const auto found = std::ranges::find(names, name);
    if (found != names.end()) return found - names.begin();
    names.push_back(name);
    return std::ssize(names) - 1;
  };
  const auto chart_of = [](const Cell& cell) {
    return absl::StrCat(cell.scheme, ", ranks: ", cell.ranks, ", tiles: ", cell.choice, ", ",
                        cell.tokens, " tokens, ", cell.direction);
  };
  double top = 0;
  for (const Cell& cell : cells) {
    place_in(masks, cell.mask);
    place_in(charts, chart_of(cell));
    top = std::max(top, cell.gflops(facts.heads, facts.head_dim));
  }
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
      "font-family=\"sans-serif\" "
      "font-size=\"10\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
      kLeft + kStep * static_cast<int>(masks.size()),
      kHeight * static_cast<int>(charts.size()) + 10);
  for (size_t chart = 0; chart < charts.size(); ++chart) {
    const int base = kHeight * (static_cast<int>(chart) + 1) - 30;
    absl::StrAppendFormat(&svg, "<text x=\"8\" y=\"%d\">GFLOP/s: %s</text>\n", base - 105,
                          charts[chart]);
    for (const Cell& cell : cells) {
      if (chart_of(cell) != charts[chart]) continue;
      const int x = kLeft + kStep * static_cast<int>(place_in(masks, cell.mask));
      const double speed = cell.gflops(facts.heads, facts.head_dim),
                   bar = top > 0 ? speed / top * 90 : 0;
      absl::StrAppendFormat(
          &svg,
          "<rect x=\"%d\" y=\"%.1f\" width=\"30\" height=\"%.1f\" fill=\"#1f77b4\"/><text x=\"%d\" "
          "y=\"%.1f\">%s</text><text x=\"%d\" y=\"%d\">%s</text>\n",
          x, base - bar, bar, x, base - bar - 2,
          cell.note.empty() ? absl::StrFormat("%.1f", speed) : cell.note, x, base + 12, cell.mask);
    }
  }
  return svg + "</svg>\n";
}

}  // namespace

int AddCells(std::vector<Cell> more, int heads, int head_dim, std::vector<Cell>* cells) {
  int wrong = 0;
  for (Cell& cell : more) {
    std::printf("%-22s %-13s %-32s %-8s %7ld tokens, %d ranks: ", cell.mask.c_str(),
                cell.choice.c_str(), cell.scheme.c_str(), cell.direction.c_str(),
                static_cast<long>(cell.tokens), cell.ranks);
    if (cell.note.empty()) {
      std::printf(
          "%.2f ms (mean of ranks %.2f), %.1f GFLOP/s, %.2f of %.2f MiB sent, imbalance %.2f, "
          "error %.1e%s\n",
          cell.slowest.median, cell.mean.median, cell.gflops(heads, head_dim), cell.mib_moved,
          cell.mib_whole, cell.imbalance, cell.error, cell.is_wrong() ? ": WRONG" : "");
    } else {
      std::printf("%s\n", cell.note.c_str());
    }
    std::fflush(stdout);
    const bool has_failed =
        !cell.note.empty() && cell.note != "unsupported" && cell.note != "out of memory";
    wrong += cell.is_wrong() || has_failed ? 1 : 0;
    cells->push_back(std::move(cell));
  }
  return wrong;
}

absl::Status WriteTable(const std::string& folder, const std::string& name,
                        std::span<const Cell> cells, const TableFacts& facts) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  std::ofstream csv(absl::StrCat(folder, "/", name, ".csv"));
  csv << "mask,choice,scheme,direction,tokens,ranks,note,max_ms,max_p20_ms,max_p80_ms,mean_ms,"
         "mean_p20_ms,mean_p80_ms,plan_ms,with_plan_ms,gflops,share,mib_moved,mib_whole,imbalance,"
         "peak_mib,error,backend,lengths,hardware,commit,date\n";
  const std::string date = absl::FormatTime("%Y-%m-%d", absl::Now(), absl::LocalTimeZone());
  for (const Cell& cell : cells) csv << Row(cell, facts, date);
  std::ofstream svg(absl::StrCat(folder, "/", name, ".svg"));
  svg << Picture(cells, facts);
  if (csv.flush().good() && svg.flush().good()) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("cannot write into ", folder, "; give --folder"));
}

}  // namespace ringleader::bench
