#include "table.hpp"

namespace smb::net {

void Table::add(uint64_t number, Entry entry) {
  const std::lock_guard<std::mutex> guard(mutex_);
  entries_[number] = std::move(entry);
}

void Table::remove(uint64_t number) {
  Entry last;  // destroyed behind the lock: this may unmap the segment
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto found = entries_.find(number);
  if (found == entries_.end()) return;
  last = std::move(found->second);
  entries_.erase(found);
}

Entry Table::find(uint64_t number) const {
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto found = entries_.find(number);
  return found == entries_.end() ? Entry{} : found->second;
}

void Table::revoke() {
  revoked_.store(true, std::memory_order_release);
  // Operations that saw it open end; those that come look again behind the gate.
  const std::unique_lock<std::shared_mutex> all(gate_);
}

}  // namespace smb::net
