#include <pybind11/stl.h>

#include "weightsync/cuda_device.hpp"
#include "weightsync/cuda_tables.hpp"
#include "weightsync/cuda_units.hpp"
#include "weightsync/delta_patch.hpp"

#include "bindings.hpp"

namespace py = pybind11;

namespace weightsync::bindings {
namespace {

// A table on the device, with what a launch must check.
struct SegmentTable {
    SegmentTable(const SegmentUnits& units, int device)
        : num_bytes(units.num_bytes),
          lowest_source(units.lowest_source),
          lowest_target(units.lowest_target),
          table(units, device) {}

    void launch(std::uintptr_t stream, std::int64_t source_base, std::int64_t target_base,
                std::uint32_t max_blocks) {
        check_base("source", lowest_source, source_base);
        check_base("target", lowest_target, target_base);
        table.launch(stream, source_base, target_base, max_blocks);
    }

    void close() { table.close(); }

    std::int64_t num_bytes;

  private:
    // A table of offsets that is launched without its base would write to low addresses.
    static void check_base(const char* side, std::int64_t lowest, std::int64_t base) {
        std::int64_t address = 0;
        if (__builtin_add_overflow(lowest, base, &address)) {
            if (lowest == INT64_MAX) return;  // an empty table
        } else if (address > 0) {
            return;
        }
        throw std::invalid_argument(std::string(side) + "_base is " + std::to_string(base) +
                                    ", but the lowest " + side + "_ptr of the table is " +
                                    std::to_string(lowest) + ": their sum is not an address");
    }

    std::int64_t lowest_source;
    std::int64_t lowest_target;
    CudaSegmentTable table;
};

template <typename Table>
struct DigestingTable {
    template <typename Units>
    DigestingTable(const Units& units, std::int64_t owners, std::int64_t bytes, int device)
        : num_owners(owners), num_bytes(bytes), table(units, device) {}

    std::int64_t num_owners;
    std::int64_t num_bytes;
    Table table;
};

using DigestTable = DigestingTable<CudaDigestTable>;
using CopyDigestTable = DigestingTable<CudaCopyDigestTable>;

const std::int64_t* owners_or_null(std::uintptr_t owners_ptr) {
    return pointer<const std::int64_t>(owners_ptr);
}

template <typename Table>
void bind_digesting(py::class_<Table>& table) {
    table.def_readonly("num_owners", &Table::num_owners)
        .def_readonly("num_bytes", &Table::num_bytes)
        .def(
            "launch",
            [](Table& self, std::uintptr_t stream) {
                const py::gil_scoped_release released;
                self.table.launch(stream);
            },
            py::arg("stream"))
        .def(
            "read",
            [](Table& self, std::uintptr_t stream, std::uintptr_t out_ptr) {
                const py::gil_scoped_release released;
                self.table.read(stream, pointer<std::uint64_t>(out_ptr));
            },
            py::arg("stream"), py::arg("out_ptr"))
        .def("close", [](Table& self) {
            const py::gil_scoped_release released;
            self.table.close();
        });
}

void bind_tables(py::module_& module) {
    py::class_<SegmentTable>(module, "CudaSegmentTable", plain_metaclass())
        .def(py::init([](std::uintptr_t table_ptr, std::int64_t num_segments, int device) {
                 const py::gil_scoped_release released;
                 return new SegmentTable(
                     cut_segments(pointer<const Segment>(table_ptr), num_segments), device);
             }),
             py::arg("table_ptr"), py::arg("num_segments"), py::arg("device"))
        .def_readonly("num_bytes", &SegmentTable::num_bytes)
        .def(
            "launch",
            [](SegmentTable& self, std::uintptr_t stream, std::int64_t source_base,
               std::int64_t target_base, std::uint32_t max_blocks) {
                const py::gil_scoped_release released;
                self.launch(stream, source_base, target_base, max_blocks);
            },
            py::arg("stream"), py::arg("source_base"), py::arg("target_base"),
            py::arg("max_blocks"))
        .def("close", [](SegmentTable& self) {
            const py::gil_scoped_release released;
            self.close();
        });
    py::class_<DigestTable> digests(module, "CudaDigestTable", plain_metaclass());
    digests.def(py::init([](std::uintptr_t table_ptr, std::int64_t num_rows,
                            std::uintptr_t owners_ptr, std::int64_t num_owners, int device) {
                    const py::gil_scoped_release released;
                    const DigestUnits units =
                        cut_digests(pointer<const DigestRow>(table_ptr), num_rows,
                                    owners_or_null(owners_ptr), num_owners);
                    return new DigestTable(units, units.num_owners, units.num_bytes, device);
                }),
                py::arg("table_ptr"), py::arg("num_rows"), py::arg("owners_ptr"),
                py::arg("num_owners"), py::arg("device"));
    bind_digesting(digests);
    py::class_<CopyDigestTable> copies(module, "CudaCopyDigestTable", plain_metaclass());
    copies.def(
        py::init([](std::uintptr_t segments_ptr, std::uintptr_t digests_ptr, std::int64_t num_rows,
                    std::uintptr_t owners_ptr, std::int64_t num_owners, int device) {
            const py::gil_scoped_release released;
            const CopyDigestUnits units = cut_copy_digests(
                pointer<const Segment>(segments_ptr), pointer<const DigestRow>(digests_ptr),
                num_rows, owners_or_null(owners_ptr), num_owners);
            return new CopyDigestTable(units, units.digested.num_owners, units.num_bytes, device);
        }),
        py::arg("segments_ptr"), py::arg("digests_ptr"), py::arg("num_rows"), py::arg("owners_ptr"),
        py::arg("num_owners"), py::arg("device"));
    bind_digesting(copies);
}

std::vector<PatchWork> patch_works(const std::vector<int>& works) {
    std::vector<PatchWork> found;
    for (const int work : works) {
        if (work < 0 || work > static_cast<int>(PatchWork::compare_former)) {
            throw std::invalid_argument("patch work " + std::to_string(work) + " of 4");
        }
        found.push_back(static_cast<PatchWork>(work));
    }
    return found;
}

std::pair<std::uint64_t, std::uint64_t> pair_of(const PatchFound& found) {
    return {found.different, found.growth};
}

void bind_patch(py::module_& module) {
    py::class_<CudaPatchTable>(module, "CudaPatchTable", plain_metaclass())
        .def(py::init([](std::uintptr_t rows_ptr, std::int64_t num_rows, int device) {
                 const py::gil_scoped_release released;
                 return new CudaPatchTable(pointer<const PatchRow>(rows_ptr), num_rows, device);
             }),
             py::arg("rows_ptr"), py::arg("num_rows"), py::arg("device"))
        .def(
            "run",
            [](CudaPatchTable& self, std::uintptr_t stream, const std::vector<int>& works) {
                const std::vector<PatchWork> wanted = patch_works(works);
                const py::gil_scoped_release released;
                return pair_of(self.run(stream, wanted));
            },
            py::arg("stream"), py::arg("works"))
        .def("close", [](CudaPatchTable& self) {
            const py::gil_scoped_release released;
            self.close();
        });
    module.def(
        "run_patch",
        [](std::uintptr_t rows_ptr, std::int64_t num_rows, const std::vector<int>& works) {
            const std::vector<PatchWork> wanted = patch_works(works);
            const py::gil_scoped_release released;
            return pair_of(run_patch(pointer<const PatchRow>(rows_ptr), num_rows, wanted));
        },
        py::arg("rows_ptr"), py::arg("num_rows"), py::arg("works"));
}

// The CPU's twins of the launches, for tests. All memory is this process's.
void bind_twins(py::module_& module) {
    module.def(
        "run_segment_units",
        [](std::uintptr_t table_ptr, std::int64_t num_segments, std::int64_t source_base,
           std::int64_t target_base) {
            const py::gil_scoped_release released;
            run_segment_units(cut_segments(pointer<const Segment>(table_ptr), num_segments),
                              source_base, target_base);
        },
        py::arg("table_ptr"), py::arg("num_segments"), py::arg("source_base"),
        py::arg("target_base"));
    module.def(
        "run_digest_units",
        [](std::uintptr_t table_ptr, std::int64_t num_rows, std::uintptr_t owners_ptr,
           std::int64_t num_owners, std::uintptr_t out_ptr) {
            const py::gil_scoped_release released;
            run_digest_units(cut_digests(pointer<const DigestRow>(table_ptr), num_rows,
                                         owners_or_null(owners_ptr), num_owners),
                             pointer<std::uint64_t>(out_ptr));
        },
        py::arg("table_ptr"), py::arg("num_rows"), py::arg("owners_ptr"), py::arg("num_owners"),
        py::arg("out_ptr"));
    module.def(
        "run_copy_digest_units",
        [](std::uintptr_t segments_ptr, std::uintptr_t digests_ptr, std::int64_t num_rows,
           std::uintptr_t owners_ptr, std::int64_t num_owners, std::uintptr_t out_ptr) {
            const py::gil_scoped_release released;
            run_copy_digest_units(cut_copy_digests(pointer<const Segment>(segments_ptr),
                                                   pointer<const DigestRow>(digests_ptr), num_rows,
                                                   owners_or_null(owners_ptr), num_owners),
                                  pointer<std::uint64_t>(out_ptr));
        },
        py::arg("segments_ptr"), py::arg("digests_ptr"), py::arg("num_rows"), py::arg("owners_ptr"),
        py::arg("num_owners"), py::arg("out_ptr"));
    module.def(
        "count_segment_units",
        [](std::uintptr_t table_ptr, std::int64_t num_segments) {
            const SegmentUnits units =
                cut_segments(pointer<const Segment>(table_ptr), num_segments);
            std::int64_t num_block = 0;
            std::int64_t num_warp = 0;
            for (const UnitList<CopyUnit>& list : units.pieces) {
                num_block += list.counts().num_block;
                num_warp += list.counts().num_warp;
            }
            return py::make_tuple(num_block, num_warp, units.grid.counts().num_warp);
        },
        py::arg("table_ptr"), py::arg("num_segments"));
}

void bind_error(py::module_& module) {
    static PyObject* const error_type = PyErr_NewExceptionWithDoc(
        "weightsync._native.CudaError", "A CUDA call failed; has error_name, call and device.",
        PyExc_RuntimeError, nullptr);
    module.attr("CudaError") = py::reinterpret_borrow<py::object>(error_type);
    py::register_exception_translator([](std::exception_ptr error) {
        try {
            if (error) std::rethrow_exception(error);
        } catch (const CudaError& failure) {
            py::object value = py::handle(error_type)(failure.what());
            value.attr("error_name") = failure.error_name();
            value.attr("call") = failure.call();
            value.attr("device") = failure.device();
            PyErr_SetObject(error_type, value.ptr());
        }
    });
}

}  // namespace

void bind_cuda(py::module_& module) {
    bind_error(module);
    bind_tables(module);
    bind_twins(module);
    bind_patch(module);
    module.def("cuda_unavailable_reason", &cuda_unavailable_reason);
    module.def("cuda_version", &cuda_version);
}

}  // namespace weightsync::bindings
