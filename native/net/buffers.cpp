#include "buffers.hpp"

#include <atomic>
#include <cassert>
#include <mutex>
#include <new>
#include <vector>

#include "frames.hpp"

namespace smb::net {
namespace {

// Two sizes: a small exchange's remembered reply must not pin a chunk's room.
constexpr size_t kSizes[] = {size_t{16} << 10, kPieceBytes};

std::atomic<size_t> memory_used{0};
std::atomic<size_t> memory_limit{SIZE_MAX};

struct Shelves {
  std::mutex mutex;
  std::vector<char*> free[2];
  size_t bytes = 0;
};

// Never destroyed: buffers may be given back by threads that end after the process's static objects did.
Shelves& shelves() {
  static Shelves& all = *new Shelves;
  return all;
}

}  // namespace

Buffer::Buffer(size_t bytes) : data_(nullptr), shelf_(bytes <= kSizes[0] ? 0 : 1) {
  assert(bytes <= kPieceBytes);
  Memory::took(kSizes[shelf_]);
  Shelves& all = shelves();
  {
    const std::lock_guard<std::mutex> guard(all.mutex);
    std::vector<char*>& free = all.free[shelf_];
    if (!free.empty()) {
      data_ = free.back();
      free.pop_back();
      all.bytes -= kSizes[shelf_];
    }
  }
  if (!data_) data_ = static_cast<char*>(::operator new(kSizes[shelf_], std::align_val_t{64}));
}

Buffer::~Buffer() {
  Memory::gave(kSizes[shelf_]);
  Shelves& all = shelves();
  {
    const std::lock_guard<std::mutex> guard(all.mutex);
    if (all.bytes + kSizes[shelf_] <= kIdleBytes) {
      all.free[shelf_].push_back(data_);
      all.bytes += kSizes[shelf_];
      return;
    }
  }
  ::operator delete(data_, std::align_val_t{64});
}

size_t Memory::used() { return memory_used.load(std::memory_order_relaxed); }
size_t Memory::limit() { return memory_limit.load(std::memory_order_relaxed); }
void Memory::set_limit(size_t bytes) { memory_limit.store(bytes, std::memory_order_relaxed); }
void Memory::took(size_t bytes) { memory_used.fetch_add(bytes, std::memory_order_relaxed); }
void Memory::gave(size_t bytes) { memory_used.fetch_sub(bytes, std::memory_order_relaxed); }

}  // namespace smb::net
