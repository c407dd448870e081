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

// Bytes that lie unused on the shelves now, at most kIdleBytes.
size_t idle_buffer_bytes();
constexpr size_t kIdleBytes = size_t{8} << 20;

}  // namespace smb::net
