// Only in ThreadSanitizer builds: tells it what absl::Mutex orders. Debian's Abseil is built
// without the sanitizer, which therefore sees neither its locks nor what they guard. The linker's
// --wrap puts these in the place of the calls that our code makes.
#include <sanitizer/tsan_interface.h>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

using absl::Condition;
using absl::CondVar;
using absl::Duration;
using absl::Mutex;
using absl::Notification;
using absl::Time;

// The linker's names: mangled, behind __wrap_ and __real_.
#define WRAPPED(name) __wrap__ZN4absl7debian3##name
#define WRAPPED_CONST(name) __wrap__ZNK4absl7debian3##name
#define REAL(name) __real__ZN4absl7debian3##name
#define REAL_CONST(name) __real__ZNK4absl7debian3##name

namespace {

// Await and Wait let go of the lock and take it again; what they do in between (other threads'
// conditions, too) is ignored.
class Rewait {
 public:
  explicit Rewait(Mutex* mutex) : mutex_(mutex) {
    __tsan_mutex_pre_unlock(mutex_, 0);
    __tsan_mutex_post_unlock(mutex_, 0);
    __tsan_mutex_pre_lock(mutex_, 0);
  }
  ~Rewait() { __tsan_mutex_post_lock(mutex_, 0, 0); }

 private:
  Mutex* const mutex_;
};

}  // namespace

extern "C" {

void REAL(5Mutex4LockEv)(Mutex*);
void REAL(5Mutex6UnlockEv)(Mutex*);
void REAL(5Mutex5AwaitERKNS0_9ConditionE)(Mutex*, const Condition&);
bool REAL(5Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE)(Mutex*, const Condition&,
                                                                    Duration);
bool REAL(5Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE)(Mutex*, const Condition&, Time);
void REAL(7CondVar4WaitEPNS0_5MutexE)(CondVar*, Mutex*);
void REAL(12Notification6NotifyEv)(Notification*);
void REAL_CONST(12Notification19WaitForNotificationEv)(const Notification*);

void WRAPPED(5Mutex4LockEv)(Mutex* mutex) {
  __tsan_mutex_pre_lock(mutex, 0);
  REAL(5Mutex4LockEv)(mutex);
  __tsan_mutex_post_lock(mutex, 0, 0);
}

void WRAPPED(5Mutex6UnlockEv)(Mutex* mutex) {
  __tsan_mutex_pre_unlock(mutex, 0);
  REAL(5Mutex6UnlockEv)(mutex);
  __tsan_mutex_post_unlock(mutex, 0);
}

void WRAPPED(5Mutex5AwaitERKNS0_9ConditionE)(Mutex* mutex, const Condition& condition) {
  const Rewait rewait(mutex);
  REAL(5Mutex5AwaitERKNS0_9ConditionE)(mutex, condition);
}

bool WRAPPED(5Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE)(Mutex* mutex,
                                                                       const Condition& condition,
                                                                       Duration timeout) {
  const Rewait rewait(mutex);
  return REAL(5Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE)(mutex, condition, timeout);
}

bool WRAPPED(5Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE)(Mutex* mutex,
                                                                    const Condition& condition,
                                                                    Time deadline) {
  const Rewait rewait(mutex);
  return REAL(5Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE)(mutex, condition, deadline);
}

void WRAPPED(7CondVar4WaitEPNS0_5MutexE)(CondVar* variable, Mutex* mutex) {
  const Rewait rewait(mutex);
  REAL(7CondVar4WaitEPNS0_5MutexE)(variable, mutex);
}

void WRAPPED(12Notification6NotifyEv)(Notification* notification) {
  __tsan_release(notification);
  REAL(12Notification6NotifyEv)(notification);
}

void WRAPPED_CONST(12Notification19WaitForNotificationEv)(const Notification* notification) {
  REAL_CONST(12Notification19WaitForNotificationEv)(notification);
  __tsan_acquire(const_cast<Notification*>(notification));
}

}  // extern "C"
