// Counts that two processes tell each other in memory which both map. No Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace data {

// The first `count` words of 64 bits behind a descriptor, each in a cache line of its own.
//
// All loads and stores are sequentially consistent: what was written to other shared memory before a store is seen by
// whoever loads that value, and of two processes that store a word each and then load the other's, one sees both.
class Words {
 public:
  static constexpr size_t kLine = 64;  // bytes

  // Throws std::system_error, or std::invalid_argument when the file is too short. The descriptor may be closed then.
  Words(int fd, size_t count);
  ~Words();
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;

  size_t count() const { return count_; }
  // index < count()
  int64_t load(size_t index) const { return __atomic_load_n(at(index), __ATOMIC_SEQ_CST); }
  void store(size_t index, int64_t value) { __atomic_store_n(at(index), value, __ATOMIC_SEQ_CST); }

 private:
  int64_t* at(size_t index) const { return reinterpret_cast<int64_t*>(memory_ + kLine * index); }

  char* memory_;
  size_t count_;
};

}  // namespace data
