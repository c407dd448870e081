#include "parallel.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace layers {
namespace {

struct Work {
  std::atomic<size_t> next{0};
  size_t tasks;
  const std::function<void(size_t)>* body;
};

// What every thread of a team does: takes the next task until none is left.
void drain(void* data) {
  Work& work = *static_cast<Work*>(data);
  for (size_t task; (task = work.next.fetch_add(1, std::memory_order_relaxed)) < work.tasks;) {
    (*work.body)(task);
  }
}

// GCC's entry into its OpenMP runtime; LLVM's and Intel's runtimes have it too. torch loads its runtime into
// the global namespace, so no extension has to be linked against one.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

Parallel find_runtime() { return reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel")); }

void run_threads(Work& work, int threads) {
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) helpers.emplace_back(drain, &work);
  drain(&work);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace

void run_tasks(size_t tasks, int threads, const std::function<void(size_t)>& body) {
  Work work;
  work.tasks = tasks;
  work.body = &body;
  const int team = static_cast<int>(std::min<size_t>(std::max(threads, 1), tasks));
  if (team <= 1) return drain(&work);
  static const Parallel parallel = find_runtime();
  if (parallel != nullptr) {
    parallel(drain, &work, static_cast<unsigned>(team), 0);
  } else {
    run_threads(work, team);
  }
}

}  // namespace layers
