// Divides a call among the threads of XLA's pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace mmjax {
namespace {

// What threads share of one call. A task that starts after all chunks are taken touches nothing
// else, so the call need not wait for it.
struct Work {
  std::atomic<int64_t> next{0};
  int64_t num_chunks = 0;
  int64_t num_done = 0;
  std::mutex mutex;
  std::condition_variable all_done;
};

// Run `compute(chunk)` for chunks [0, num_chunks), in this thread and in those of XLA's pool.
//
// This thread takes chunks, too, and waits for those alone that others have begun: it may itself be
// one of the pool's.
template <typename Compute>
void share(xla::ffi::ThreadPool pool, int64_t num_chunks, Compute compute) {
  const int64_t num_helpers = std::min(pool.num_threads(), num_chunks) - 1;
  if (num_helpers < 1) {
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) compute(chunk);
    return;
  }
  auto work = std::make_shared<Work>();
  work->num_chunks = num_chunks;
  auto take_all = [work, compute] {
    int64_t num_done = 0;
    for (int64_t chunk; (chunk = work->next.fetch_add(1)) < work->num_chunks; ++num_done) {
      compute(chunk);
    }
    if (num_done == 0) return;
    std::lock_guard<std::mutex> lock(work->mutex);
    work->num_done += num_done;
    if (work->num_done == work->num_chunks) work->all_done.notify_one();
  };
  for (int64_t helper = 0; helper < num_helpers; ++helper) {
    auto task = take_all;
    pool.Schedule(std::move(task));
  }
  take_all();
  std::unique_lock<std::mutex> lock(work->mutex);
  work->all_done.wait(lock, [&] { return work->num_done == work->num_chunks; });
}

}  // namespace
}  // namespace mmjax
