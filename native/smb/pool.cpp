#include "pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "common/pause.hpp"
#include "robust.hpp"

namespace smb {
namespace {

constexpr int64_t kLongNs = int64_t{3600} * 1000000000;
constexpr int kSpins = 2000;  // about 40 us: what a wake across processors costs anyway

// One helper thread: idle (0), told to run (1), done (2). The caller that got it owns it until it sees 2.
struct Runner {
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
  Runner& self = *static_cast<Runner*>(argument);
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

bool start(Runner& runner) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the main thread's
  const int failed = pthread_create(&runner.thread, nullptr, serve, &runner);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!failed) pthread_detach(runner.thread);
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

void pin(Runner& runner, int cpu) {
  if (runner.cpu == cpu) return;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  if (pthread_setaffinity_np(runner.thread, sizeof one, &one) == 0) runner.cpu = cpu;
}

class Pool {
 public:
  // Up to wanted runners, each bound to a processor of its own where there are enough.
  std::vector<Runner*> take(size_t wanted) {
    std::vector<Runner*> taken;
    const std::vector<int> cpus = other_cpus();
    wanted = std::min(wanted, cpus.size());
    const std::lock_guard<std::mutex> guard(mutex_);
    while (taken.size() < wanted) {
      if (idle_.empty() && !add()) break;
      Runner* runner = idle_.back();
      idle_.pop_back();
      pin(*runner, cpus[taken.size()]);
      taken.push_back(runner);
    }
    return taken;
  }

  void give(const std::vector<Runner*>& taken) {
    const std::lock_guard<std::mutex> guard(mutex_);
    idle_.insert(idle_.end(), taken.begin(), taken.end());
  }

 private:
  bool add() {
    auto runner = std::make_unique<Runner>();
    if (!start(*runner)) return false;
    idle_.push_back(runner.release());  // lives as long as its thread: until the process ends
    return true;
  }

  std::mutex mutex_;
  std::vector<Runner*> idle_;
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
  const std::vector<Runner*> runners = shared.take(threads - 1);
  for (size_t i = 0; i < runners.size(); ++i) {
    runners[i]->part = &part;
    runners[i]->index = i + 1;
    runners[i]->state.store(1, std::memory_order_release);
    futex_wake(&runners[i]->state, 1);
  }
  part(0);
  for (Runner* runner : runners) {
    await(runner->state, 1);
    runner->state.store(0, std::memory_order_relaxed);
  }
  shared.give(runners);
}

}  // namespace smb
