// Divides a call among the threads of XLA's pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace mmjax {

// The newest call, for threads that are still awake behind the one before it.
class Newest {
 public:
  // Return how many threads are awake to see it.
  int64_t publish(std::function<void()> help);

  // Help with call after call, until none comes for a while; not where others are awake already.
  void help_on(int64_t max_awake);

 private:
  std::mutex mutex_;
  std::function<void()> help_;
  std::atomic<uint64_t> number_{0};
  std::atomic<int64_t> num_awake_{0};
};

// The library's only one: a thread that is awake sees calls of all kernels.
Newest& newest();

namespace {

// How long a thread looks for work, or for the end of others' work, before it sleeps: waking it
// takes as long as a product of few rows.
constexpr std::chrono::microseconds kPatience{60};

// Return `is_done()` as soon as it is true, else false at the end of `kPatience`.
template <typename IsDone>
bool wait_awake(IsDone is_done) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  do {
    for (int i = 0; i < 32; ++i) {
      if (is_done()) return true;
      __builtin_ia32_pause();
    }
    std::this_thread::yield();  // whoever has something to do comes first
  } while (std::chrono::steady_clock::now() < end);
  return is_done();
}

// What threads share of one call. A task that starts after all chunks are taken touches nothing
// else, so the call need not wait for it.
struct Work {
  std::atomic<int64_t> next{0};
  int64_t num_chunks = 0;
  std::atomic<int64_t> num_done{0};
  std::mutex mutex;
  std::condition_variable all_done;

  bool is_done() const { return num_done.load() == num_chunks; }
};

// Run `compute(chunk)` for chunks [0, num_chunks), in this thread and in those of XLA's pool.
//
// This thread takes chunks, too, and waits for those alone that others have begun: it may itself be
// one of the pool's. `stays_awake`: threads look for the next call for a while.
template <typename Compute>
void share(xla::ffi::ThreadPool pool, int64_t num_chunks, Compute compute,
           bool stays_awake = false) {
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
    if (work->num_done.fetch_add(num_done) + num_done < work->num_chunks) return;
    std::lock_guard<std::mutex> lock(work->mutex);
    work->all_done.notify_one();
  };
  const int64_t num_awake = newest().publish(take_all);
  for (int64_t helper = num_awake; helper < num_helpers; ++helper) {
    auto task = [take_all, stays_awake, num_helpers] {
      take_all();
      if (stays_awake) newest().help_on(num_helpers);
    };
    pool.Schedule(std::move(task));
  }
  take_all();
  if (wait_awake([&] { return work->is_done(); })) return;
  std::unique_lock<std::mutex> lock(work->mutex);
  work->all_done.wait(lock, [&] { return work->is_done(); });
}

}  // namespace
}  // namespace mmjax
