#include "share.h"

namespace mmjax {

Newest& newest() {
  static Newest* const one = new Newest;  // never destroyed: threads may outlive the program's end
  return *one;
}

int64_t Newest::publish(std::function<void()> help) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    help_ = std::move(help);
  }
  number_.fetch_add(1);
  return num_awake_.load();
}

void Newest::help_on(int64_t max_awake) {
  if (num_awake_.fetch_add(1) < max_awake) {
    uint64_t seen = number_.load();
    while (wait_awake([&] { return number_.load() != seen; })) {
      std::function<void()> help;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        seen = number_.load();
        help = help_;
      }
      help();
    }
  }
  num_awake_.fetch_sub(1);
}

}  // namespace mmjax
