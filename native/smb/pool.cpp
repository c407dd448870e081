#include "pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "robust.hpp"

namespace smb {
namespace {

constexpr int64_t kLongNs = int64_t{3600} * 1000000000;
constexpr int kSpins = 2000;  // about 40 us: what a wake across processors costs anyway

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// One helper: idle (0), told to run (1), done (2). The caller that got it owns it until it sees 2.
struct Helper {
  Word state{0};
  pthread_t thread{};
  int cpu = -1;
  size_t index = 0;
  const std::function<void(size_t)>* part = nullptr;
};

void await(const Word& state, uint32_t unwanted) {
  for (int i = 0; i < kSpins; ++i) {
    if (state.load(std::memory_order_acquire) != unwanted) return;
    pause();
  }
  while (state.load(std::memory_order_acquire) == unwanted) futex_wait(&state, unwanted, kLongNs);
}

void* serve(void* argument) {
  Helper& self = *static_cast<Helper*>(argument);
  for (;;) {
    for (uint32_t seen; (seen = self.state.load(std::memory_order_acquire)) != 1;) {
      futex_wait(&self.state, seen, kLongNs);
    }
    (*self.part)(self.index);
    self.state.store(2, std::memory_order_release);
    futex_wake(&self.state, 1);
  }
  return nullptr;
}

bool start(Helper& helper) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the main thread's
  const int failed = pthread_create(&helper.thread, nullptr, serve, &helper);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!failed) pthread_detach(helper.thread);
  return !failed;
}

// The processors that this process may use, but for the one the caller runs on now.
std::vector<int> other_cpus() {
  std::vector<int> cpus;
  cpu_set_t allowed;
  // The main thread's set stands for the process: a caller may have pinned itself.
  if (sched_getaffinity(getpid(), sizeof allowed, &allowed) != 0) return cpus;
  const int mine = sched_getcpu();
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed) && cpu != mine) cpus.push_back(cpu);
  }
  return cpus;
}

void pin(Helper& helper, int cpu) {
  if (helper.cpu == cpu) return;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  if (pthread_setaffinity_np(helper.thread, sizeof one, &one) == 0) helper.cpu = cpu;
}

class Pool {
 public:
  // Up to wanted helpers, each bound to a processor of its own where there are enough.
  std::vector<Helper*> take(size_t wanted) {
    std::vector<Helper*> taken;
    const std::vector<int> cpus = other_cpus();
    wanted = std::min(wanted, cpus.size());
    const std::lock_guard<std::mutex> guard(mutex_);
    while (taken.size() < wanted) {
      if (idle_.empty() && !add()) break;
      Helper* helper = idle_.back();
      idle_.pop_back();
      pin(*helper, cpus[taken.size()]);
      taken.push_back(helper);
    }
    return taken;
  }

  void give(const std::vector<Helper*>& taken) {
    const std::lock_guard<std::mutex> guard(mutex_);
    idle_.insert(idle_.end(), taken.begin(), taken.end());
  }

 private:
  bool add() {
    auto helper = std::make_unique<Helper>();
    if (!start(*helper)) return false;
    idle_.push_back(helper.release());  // lives as long as its thread: until the process ends
    return true;
  }

  std::mutex mutex_;
  std::vector<Helper*> idle_;
};

std::atomic<Pool*> current{nullptr};

void forget_pool() { current.store(nullptr, std::memory_order_relaxed); }

struct ForkGuard {
  ForkGuard() { pthread_atfork(nullptr, nullptr, forget_pool); }
};
const ForkGuard fork_guard;

// Never destroyed: its threads may sleep in it until the process is gone.
Pool& pool() {
  Pool* found = current.load(std::memory_order_acquire);
  if (found) return *found;
  auto made = std::make_unique<Pool>();
  if (current.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel)) return *made.release();
  return *found;
}

}  // namespace

void run_parts(size_t threads, const std::function<void(size_t)>& part) {
  if (threads <= 1) {
    part(0);
    return;
  }
  Pool& shared = pool();
  const std::vector<Helper*> helpers = shared.take(threads - 1);
  for (size_t i = 0; i < helpers.size(); ++i) {
    helpers[i]->part = &part;
    helpers[i]->index = i + 1;
    helpers[i]->state.store(1, std::memory_order_release);
    futex_wake(&helpers[i]->state, 1);
  }
  part(0);
  for (Helper* helper : helpers) {
    await(helper->state, 1);
    helper->state.store(0, std::memory_order_relaxed);
  }
  shared.give(helpers);
}

}  // namespace smb
