#include "weightsync/digest.hpp"

#include "bindings.hpp"

namespace py = pybind11;

namespace weightsync::bindings {

void bind_digest(py::module_& module) {
    module.attr("NUM_DIGEST_COLUMNS") = kDigestColumns;
    module.def(
        "digest_segments",
        [](std::uintptr_t table_ptr, std::int64_t num_rows, std::uintptr_t out_ptr,
           int num_threads) {
            check_num_threads(num_threads);
            if (num_rows > 0 && (out_ptr == 0 || out_ptr % alignof(std::uint64_t) != 0)) {
                throw std::invalid_argument("out_ptr is null or not aligned");
            }
            const py::gil_scoped_release released;
            digest_segments(pointer<const DigestRow>(table_ptr), num_rows,
                            pointer<std::uint64_t>(out_ptr), num_threads);
        },
        py::arg("table_ptr"), py::arg("num_rows"), py::arg("out_ptr"), py::arg("num_threads"));
}

}  // namespace weightsync::bindings
