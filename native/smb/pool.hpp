// Helper threads for long operations, pinned: unpinned ones gain nothing, since the kernel puts a woken
// thread on its waker's processor.
#pragma once

#include <cstddef>
#include <functional>

namespace smb {

// Calls part(0) on the calling thread and part(1) .. part(k-1) on helpers at the same time, k <= threads:
// as many as there are idle helpers and allowed processors besides the caller's. Returns when all have
// returned. The parts must not throw, and must be written so that part(0) alone does the whole work.
// Helpers are started on first use, started anew in a forked child, and sleep in between.
void run_parts(size_t threads, const std::function<void(size_t)>& part);

}  // namespace smb
