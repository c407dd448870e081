// Splits independent tasks over the threads that torch already has.
#pragma once

#include <cstddef>
#include <functional>

namespace layers {

// Calls body(task) once for every task in [0, tasks), on at most `threads` threads, in any order; returns when
// all are done. body must not throw and must not write what another task reads.
//
// Inside a process that has torch, the tasks run on torch's own OpenMP team: a second pool would fight for the
// cores with that team's threads, which spin for milliseconds after each of torch's operations. Without an
// OpenMP runtime, threads are started for the call.
void run_tasks(size_t tasks, int threads, const std::function<void(size_t)>& body);

}  // namespace layers
