// What one session may reach.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "smb/buffer.hpp"
#include "smb/region.hpp"

namespace smb::net {

struct Entry {
  std::shared_ptr<Region> region;
  DType dtype;
  size_t count = 0;  // elements
  bool writable = false;
};

class Table {
 public:
  void add(uint64_t number, Entry entry);
  void remove(uint64_t number);
  // An entry without region when there is none of this number.
  Entry find(uint64_t number) const;

  // Fencing: returns when no operation runs, and none will.
  void revoke();
  bool revoked() const { return revoked_.load(std::memory_order_acquire); }

  // Held while an operation runs, never while the network is waited for.
  class Pass {
   public:
    explicit Pass(Table& table) : guard_(table.gate_), granted_(!table.revoked()) {}
    bool granted() const { return granted_; }

   private:
    std::shared_lock<std::shared_mutex> guard_;
    const bool granted_;
  };

 private:
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, Entry> entries_;
  std::shared_mutex gate_;
  std::atomic<bool> revoked_{false};
};

}  // namespace smb::net
