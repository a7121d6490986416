// A store of which tests change a part.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "coordinator/store/store.h"

namespace ringleader::api::testing {

class ForwardingStore : public store::Store {
 public:
  explicit ForwardingStore(store::Store* store) : store_(store) {}
  absl::Status Read(absl::FunctionRef<absl::Status(store::ReadTransaction&)> body) override {
    return store_->Read(body);
  }
  absl::Status Write(absl::FunctionRef<absl::Status(store::WriteTransaction&)> body,
                     store::Need need) override {
    return store_->Write(body, need);
  }
  absl::Status Space() override { return store_->Space(); }
  uint64_t revision() const override { return store_->revision(); }
  std::unique_ptr<Subscription> Subscribe(
      std::function<void(const store::Change&)> listener) override {
    return store_->Subscribe(std::move(listener));
  }

 private:
  store::Store* const store_;
};

}  // namespace ringleader::api::testing
