#include "words.hpp"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace data {

Words::Words(int fd, size_t count) : count_(count) {
  struct stat file;
  if (fstat(fd, &file)) throw std::system_error(errno, std::generic_category(), "fstat of the words");
  if (size_t(file.st_size) < kLine * count) throw std::invalid_argument("the file is too short for so many words");
  void* memory = mmap(nullptr, kLine * count, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of the words");
  memory_ = static_cast<char*>(memory);
}

Words::~Words() { munmap(memory_, kLine * count_); }

}  // namespace data
