// A loop over independent tasks on XLA's own thread pool.
//
// The calling thread takes tasks too, and at the end waits only for those that another thread has begun: a handler
// may itself run on the pool, whose other threads may all be busy, so it must never wait for a task that nobody
// has started.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace jaxsoft::cpu {

template <class Task>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t tasks, const Task& task) {
  int64_t helpers = std::min<int64_t>(pool.num_threads(), tasks) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < tasks; i++) task(i);
    return;
  }
  struct Shared {  // outlives the call: a helper may wake up after all is done, and then finds nothing to do
    std::atomic<int64_t> next{0};
    int64_t done = 0;
    std::mutex mutex;
    std::condition_variable all_done;
  };
  auto shared = std::make_shared<Shared>();
  auto work = [shared, tasks, &task] {
    int64_t mine = 0;
    for (int64_t i; (i = shared->next.fetch_add(1)) < tasks; mine++) task(i);
    if (mine == 0) return;
    std::lock_guard<std::mutex> lock(shared->mutex);
    shared->done += mine;
    if (shared->done == tasks) shared->all_done.notify_one();
  };
  for (int64_t i = 0; i < helpers; i++) pool.Schedule(decltype(work)(work));
  work();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_done.wait(lock, [&] { return shared->done == tasks; });
}

}  // namespace jaxsoft::cpu
