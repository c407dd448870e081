// The Python face of leveldb.hpp.
#include <pybind11/pybind11.h>

#include "leveldb.hpp"

namespace py = pybind11;

namespace {

const uint8_t* bytes_of(const std::string_view& view) { return reinterpret_cast<const uint8_t*>(view.data()); }

py::bytes unpack(const py::bytes& packed, size_t limit) {
  const std::string_view view = packed;
  std::string out;
  if (!leveldb::snappy(bytes_of(view), view.size(), limit, out)) throw py::value_error("is no Snappy data");
  return py::bytes(out);
}

py::list entries(const py::bytes& block) {
  const std::string_view view = block;
  leveldb::Block reader(bytes_of(view), view.size());
  leveldb::Entry entry;
  py::list all;
  size_t spread = 0;  // of the keys: each may repeat the one before it for three bytes
  const size_t most = (size_t{16} << 20) + 64 * view.size();
  while (reader.next(entry)) {
    if ((spread += entry.key.size()) > most) throw py::value_error("repeats its keys beyond measure");
    const char* value = reinterpret_cast<const char*>(entry.value);
    all.append(py::make_tuple(py::bytes(entry.key), py::bytes(value, entry.size)));
  }
  if (!reader.whole()) throw py::value_error("is no block of entries");
  return all;
}

uint32_t checksum(const py::bytes& data, uint32_t crc) {
  const std::string_view view = data;
  return leveldb::crc32c(crc, bytes_of(view), view.size());
}

}  // namespace

void bind_leveldb(py::module_& m) {
  m.def("snappy_unpack", &unpack, py::arg("packed"), py::arg("limit"));
  m.def("leveldb_entries", &entries, py::arg("block"));
  m.def("crc32c", &checksum, py::arg("data"), py::arg("crc") = 0);
}
