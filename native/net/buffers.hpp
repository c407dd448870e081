// Memory for one piece's elements, shared by all connections: only pieces under way have one.
#pragma once

#include <cstddef>
#include <memory>

namespace smb::net {

class Buffer {
 public:
  // Room for at least so many bytes, at most a chunk's; 64-byte aligned. Goes back when the last holder lets go.
  explicit Buffer(size_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  static std::shared_ptr<Buffer> take(size_t bytes) { return std::make_shared<Buffer>(bytes); }

  char* data() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }

 private:
  char* data_;
  size_t shelf_;
};

constexpr size_t kIdleBytes = size_t{8} << 20;  // of unused buffers that are kept for the next ones

// What all streams of this process hold in buffers and shadows, and how much of it there may be.
class Memory {
 public:
  static size_t used();
  static size_t limit();
  static void set_limit(size_t bytes);
  static bool fits(size_t bytes) { return used() + bytes <= limit(); }
  static void took(size_t bytes);
  static void gave(size_t bytes);
};

}  // namespace smb::net
