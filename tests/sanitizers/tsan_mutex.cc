// Only in ThreadSanitizer builds: tells it what Abseil's locks order. Debian's Abseil, and gRPC
// which locks with it, are built without the sanitizer, which therefore sees neither the locks nor
// what they guard. These definitions stand before the library's for all of the program, its shared
// libraries included; they call the library's own.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <atomic>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

using absl::Condition;
using absl::CondVar;
using absl::Duration;
using absl::Mutex;
using absl::Notification;
using absl::Time;

namespace {

// The library's function of this (mangled) name. Also called before constructors run.
template <typename Function>
Function* Real(std::atomic<Function*>& cached, const char* name) {
  Function* function = cached.load(std::memory_order_relaxed);
  if (function == nullptr) {
    function = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
    cached.store(function, std::memory_order_relaxed);
  }
  return function;
}

// What happens inside a call that lets go of the lock or hands it on is ignored: the library runs
// other threads' conditions there, under the lock.
struct Locking {
  explicit Locking(Mutex* mutex) : mutex(mutex) { __tsan_mutex_pre_lock(mutex, 0); }
  ~Locking() { __tsan_mutex_post_lock(mutex, 0, 0); }
  Mutex* const mutex;
};
struct Unlocking {
  explicit Unlocking(Mutex* mutex) : mutex(mutex) { __tsan_mutex_pre_unlock(mutex, 0); }
  ~Unlocking() { __tsan_mutex_post_unlock(mutex, 0); }
  Mutex* const mutex;
};
// One wait calls another within the library.
class Waiting {
 public:
  explicit Waiting(Mutex* mutex) : mutex_(mutex) {
    if (depth_++ > 0) return;
    __tsan_mutex_pre_unlock(mutex_, 0);
    __tsan_mutex_post_unlock(mutex_, 0);
    __tsan_mutex_pre_lock(mutex_, 0);
  }
  ~Waiting() {
    if (--depth_ == 0) __tsan_mutex_post_lock(mutex_, 0, 0);
  }

 private:
  static thread_local int depth_;
  Mutex* const mutex_;
};
thread_local int Waiting::depth_ = 0;

}  // namespace

// Defines the function of the mangled name `symbol`; REAL within it is the library's.
#define INTERPOSED(result, symbol, ...)                   \
  extern "C" result symbol(__VA_ARGS__);                  \
  namespace {                                             \
  std::atomic<decltype(symbol)*> real_##symbol = nullptr; \
  }                                                       \
  extern "C" result symbol(__VA_ARGS__)
#define REAL(symbol) Real(real_##symbol, #symbol)

INTERPOSED(void, _ZN4absl7debian35Mutex4LockEv, Mutex* mutex) {
  const Locking locking(mutex);
  REAL(_ZN4absl7debian35Mutex4LockEv)(mutex);
}

INTERPOSED(void, _ZN4absl7debian35Mutex8LockWhenERKNS0_9ConditionE, Mutex* mutex,
           const Condition& condition) {
  const Locking locking(mutex);
  REAL(_ZN4absl7debian35Mutex8LockWhenERKNS0_9ConditionE)(mutex, condition);
}

INTERPOSED(bool, _ZN4absl7debian35Mutex20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE,
           Mutex* mutex, const Condition& condition, Time deadline) {
  const Locking locking(mutex);
  return REAL(_ZN4absl7debian35Mutex20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE)(
      mutex, condition, deadline);
}

INTERPOSED(void, _ZN4absl7debian35Mutex6UnlockEv, Mutex* mutex) {
  const Unlocking unlocking(mutex);
  REAL(_ZN4absl7debian35Mutex6UnlockEv)(mutex);
}

INTERPOSED(bool, _ZN4absl7debian35Mutex7TryLockEv, Mutex* mutex) {
  __tsan_mutex_pre_lock(mutex, __tsan_mutex_try_lock);
  const bool locked = REAL(_ZN4absl7debian35Mutex7TryLockEv)(mutex);
  __tsan_mutex_post_lock(mutex, __tsan_mutex_try_lock | (locked ? 0 : __tsan_mutex_try_lock_failed),
                         0);
  return locked;
}

INTERPOSED(void, _ZN4absl7debian35MutexD1Ev, Mutex* mutex) {
  REAL(_ZN4absl7debian35MutexD1Ev)(mutex);
  __tsan_mutex_destroy(mutex, __tsan_mutex_linker_init);
}

INTERPOSED(void, _ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE, Mutex* mutex,
           const Condition& condition) {
  const Waiting waiting(mutex);
  REAL(_ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE)(mutex, condition);
}

INTERPOSED(bool, _ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE,
           Mutex* mutex, const Condition& condition, Duration timeout) {
  const Waiting waiting(mutex);
  return REAL(_ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE)(
      mutex, condition, timeout);
}

INTERPOSED(bool, _ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE,
           Mutex* mutex, const Condition& condition, Time deadline) {
  const Waiting waiting(mutex);
  return REAL(_ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE)(
      mutex, condition, deadline);
}

INTERPOSED(void, _ZN4absl7debian37CondVar4WaitEPNS0_5MutexE, CondVar* variable, Mutex* mutex) {
  const Waiting waiting(mutex);
  REAL(_ZN4absl7debian37CondVar4WaitEPNS0_5MutexE)(variable, mutex);
}

INTERPOSED(bool, _ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE,
           CondVar* variable, Mutex* mutex, Duration timeout) {
  const Waiting waiting(mutex);
  return REAL(_ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE)(variable, mutex,
                                                                                    timeout);
}

INTERPOSED(bool, _ZN4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE,
           CondVar* variable, Mutex* mutex, Time deadline) {
  const Waiting waiting(mutex);
  return REAL(_ZN4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE)(variable, mutex,
                                                                                 deadline);
}

INTERPOSED(void, _ZN4absl7debian312Notification6NotifyEv, Notification* notification) {
  __tsan_release(notification);
  REAL(_ZN4absl7debian312Notification6NotifyEv)(notification);
}

INTERPOSED(void, _ZNK4absl7debian312Notification19WaitForNotificationEv,
           const Notification* notification) {
  REAL(_ZNK4absl7debian312Notification19WaitForNotificationEv)(notification);
  __tsan_acquire(const_cast<Notification*>(notification));
}
