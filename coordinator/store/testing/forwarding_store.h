// A store of which tests change a part.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "coordinator/store/store.h"

namespace ringleader::store::testing {

class ForwardingStore : public Store {
 public:
  explicit ForwardingStore(Store* store) : store_(store) {}
  absl::Status Read(absl::FunctionRef<absl::Status(ReadTransaction&)> body) override {
    return store_->Read(body);
  }
  absl::Status Write(absl::FunctionRef<absl::Status(WriteTransaction&)> body, Need need) override {
    return store_->Write(body, need);
  }
  absl::Status Space() override { return store_->Space(); }
  absl::Status Writable() override {
    const absl::Status space = Space();  // which a test may have something else to say of
    return space.ok() ? store_->Writable() : space;
  }
  uint64_t revision() const override { return store_->revision(); }
  std::unique_ptr<Subscription> Subscribe(std::function<void(const Change&)> listener) override {
    return store_->Subscribe(std::move(listener));
  }

 private:
  Store* const store_;
};

}  // namespace ringleader::store::testing
