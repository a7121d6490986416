#include "worker/attention/heads/shared_heads.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "base/status_macros.h"

namespace ringleader::attention {

using torch::Tensor;

absl::StatusOr<std::unique_ptr<StartedExchange>> SharedHeads::StartParts(Tensor parts) {
  bytes_ += static_cast<uint64_t>(parts.nbytes()) / ranks() * (ranks() - 1);
  return exchange_.Start(std::move(parts));
}

absl::StatusOr<SharedHeads::Started> SharedHeads::Start(std::initializer_list<Tensor> tensors) {
  Started started;
  for (const Tensor& x : tensors) {
    const int64_t copies = std::max<int64_t>(1, ranks() / x.size(1));
    const Tensor all = copies == 1 ? x : x.repeat_interleave(copies, 1);
    ASSIGN_OR_RETURN(
        started.emplace_back(),
        StartParts(
            all.unflatten(1, {ranks(), all.size(1) / ranks()}).transpose(0, 1).contiguous()));
  }
  return started;
}

absl::Status SharedHeads::Await(const Started& started, std::initializer_list<Tensor*> tensors) {
  auto arriving = started.begin();
  for (Tensor* const x : tensors) {
    ASSIGN_OR_RETURN(const Tensor parts, (*arriving++)->Await());
    *x = parts.flatten(0, 1);
  }
  return absl::OkStatus();
}

absl::Status SharedHeads::ToHeads(std::initializer_list<Tensor*> tensors) {
  Started started;
  for (Tensor* const x : tensors) {
    ASSIGN_OR_RETURN(Started one, Start({*x}));
    started.push_back(std::move(one.front()));
  }
  return Await(started, tensors);
}

absl::Status SharedHeads::ToTokens(std::initializer_list<Returned> tensors) {
  Started started;
  for (const auto& [x, heads] : tensors) {
    ASSIGN_OR_RETURN(started.emplace_back(),
                     StartParts(x->unflatten(0, {ranks(), x->size(0) / ranks()}).contiguous()));
  }
  auto arriving = started.begin();
  for (const auto& [x, heads] : tensors) {
    ASSIGN_OR_RETURN(Tensor parts, (*arriving++)->Await());  // [ranks, n, heads of a rank, d]
    const int64_t copies = std::max<int64_t>(1, ranks() / heads);
    if (copies > 1) {
      const Tensor by_head = parts.unflatten(0, {heads, copies});
      Tensor sum = by_head.select(1, 0).to(torch::kFloat, /*non_blocking=*/false, /*copy=*/true);
      for (int64_t copy = 1; copy < copies; ++copy) sum += by_head.select(1, copy);
      parts = sum.to(parts.scalar_type());
    }
    *x = parts.transpose(0, 1).flatten(1, 2).contiguous();
  }
  return absl::OkStatus();
}

}  // namespace ringleader::attention
