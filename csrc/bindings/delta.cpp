#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <string>
#include <string_view>

#include "bindings.hpp"
#include "weightsync/delta_batch.hpp"
#include "weightsync/delta_decode_batch.hpp"
#include "weightsync/delta_kernels.hpp"
#include "weightsync/delta_packed.hpp"

namespace py = pybind11;

namespace weightsync::bindings {
namespace {

// kind, start_element, num_elements, seed, word_bytes; addresses of lengths that follow from these.
using PlaceColumns = std::array<std::uint64_t, 5>;

DeltaPlace place_of(const PlaceColumns& columns) {
    const DeltaPlace place{static_cast<DeltaKind>(columns[0] & 0xFF), columns[1],
                           static_cast<std::int64_t>(columns[2]), columns[3],
                           static_cast<int>(columns[4])};
    validate_delta_place(place);
    return place;
}

void check_pointers(std::initializer_list<std::uintptr_t> pointers) {
    for (const std::uintptr_t ptr : pointers) {
        if (ptr == 0) throw std::invalid_argument("delta: a pointer is null");
    }
}

void check_element(int element_bytes) {
    if (element_bytes != 1 && element_bytes != 2 && element_bytes != 4) {
        throw std::invalid_argument("element_bytes is " + std::to_string(element_bytes) +
                                    ", expected 1, 2 or 4");
    }
}

py::tuple encode(const PlaceColumns& columns, std::uintptr_t old_ptr, std::uintptr_t new_ptr,
                 bool is_absolute, bool is_dense, std::uintptr_t record_ptr,
                 std::uintptr_t dense_ptr, std::uintptr_t digests_ptr) {
    check_pointers({old_ptr, new_ptr, record_ptr, dense_ptr, digests_ptr});
    const DeltaPlace place = place_of(columns);
    DeltaEncoded encoded{};
    {
        const py::gil_scoped_release released;
        encoded = delta_encode(
            place, pointer<const unsigned char>(old_ptr), pointer<const unsigned char>(new_ptr),
            is_absolute, is_dense, pointer<unsigned char>(record_ptr),
            pointer<unsigned char>(dense_ptr), pointer<std::uint64_t>(digests_ptr));
    }
    return py::make_tuple(encoded.record_bytes, encoded.dense_elements);
}

py::tuple decode(const PlaceColumns& columns, std::uintptr_t record_ptr, std::int64_t record_bytes,
                 std::uintptr_t dense_ptr, std::int64_t num_dense, std::uintptr_t old_ptr,
                 bool are_digests_known, std::uintptr_t positions_ptr, std::uintptr_t values_ptr,
                 std::int64_t capacity, std::uintptr_t digests_ptr) {
    check_pointers({record_ptr, old_ptr, positions_ptr, values_ptr, digests_ptr});
    const DeltaPlace place = place_of(columns);
    DeltaDecoded decoded{};
    {
        const py::gil_scoped_release released;
        decoded =
            delta_decode(place, pointer<const unsigned char>(record_ptr), record_bytes,
                         pointer<const unsigned char>(dense_ptr), num_dense,
                         pointer<const unsigned char>(old_ptr), are_digests_known,
                         pointer<std::uint32_t>(positions_ptr), pointer<unsigned char>(values_ptr),
                         capacity, pointer<std::uint64_t>(digests_ptr));
    }
    return py::make_tuple(decoded.num_changed, decoded.old_digest, decoded.new_digest);
}

// Spans coded where they lie: on a device, or (device -1, for tests) by its twin.
class DeltaEncoder {
  public:
    DeltaEncoder(int device, std::uint32_t capacity) : capacity_(capacity) {
        if (device >= 0) cuda_ = std::make_unique<CudaDeltaEncoder>(device);
    }
    std::int64_t run(std::uintptr_t rows_ptr, std::int64_t num_rows, std::uintptr_t digests_ptr,
                     std::uintptr_t stream, std::uintptr_t sample_stream, int num_threads) {
        batch_ = delta_batch(pointer<const DeltaSpanRow>(rows_ptr), num_rows);
        if (cuda_ != nullptr) {
            cuda_->run(&batch_, pointer<const std::uint64_t>(digests_ptr), stream, sample_stream,
                       num_threads);
        } else {
            arena_.clear();
            run_delta_batch(&batch_, pointer<const std::uint64_t>(digests_ptr), capacity_,
                            &results_, &arena_);
        }
        return delta_batch_layout(&batch_, num_threads);
    }
    // Writes int64 [spans, 3]: what became of it, where its record begins, and its bytes.
    void outcomes(std::uintptr_t out_ptr) const {
        auto* out = pointer<std::int64_t>(out_ptr);
        for (std::size_t row = 0; row < batch_.rows.size(); ++row) {
            *out++ = static_cast<std::int64_t>(batch_.outcomes[row]);
            *out++ = batch_.offsets[row];
            *out++ = batch_.offsets[row + 1] - batch_.offsets[row];
        }
    }
    void write(std::uintptr_t payload_ptr, std::uintptr_t digests_ptr, int num_threads) const {
        delta_batch_write(batch_, pointer<unsigned char>(payload_ptr),
                          pointer<std::uint64_t>(digests_ptr), num_threads);
    }
    std::vector<double> seconds() const {
        return cuda_ == nullptr ? std::vector<double>{} : cuda_->seconds();
    }
    void close() {
        if (cuda_ != nullptr) cuda_->close();
    }

  private:
    std::uint32_t capacity_;
    std::unique_ptr<CudaDeltaEncoder> cuda_;
    std::vector<DeltaBlockResult> results_;
    std::vector<unsigned char> arena_;
    DeltaBatch batch_;
};

// Records decoded where their old values lie: on a device, or (device -1, for tests) by its twin.
class DeltaDecoder {
  public:
    explicit DeltaDecoder(int device) {
        if (device >= 0) cuda_ = std::make_unique<CudaDeltaDecoder>(device);
    }
    // `inputs_ptr`: uint64 [num_rows, 2], record and its bytes. Writes int64 [num_rows] to
    // `outcomes_ptr`, and the new digests of all blocks of what is done.
    void run(std::uintptr_t rows_ptr, std::uintptr_t inputs_ptr, std::int64_t num_rows,
             std::uintptr_t digests_ptr, std::uintptr_t outcomes_ptr, std::uintptr_t stream,
             int num_threads) {
        const auto start = std::chrono::steady_clock::now();
        std::vector<DeltaDecodeInput> inputs;
        const auto* in = pointer<const std::uint64_t>(inputs_ptr);
        for (std::int64_t i = 0; i < num_rows; ++i, in += 2) {
            inputs.push_back(
                {pointer<const unsigned char>(in[0]), static_cast<std::int64_t>(in[1])});
        }
        DeltaDecodeBatch batch = delta_decode_batch(pointer<const DeltaDecodeRow>(rows_ptr),
                                                    inputs.data(), num_rows, num_threads);
        index_s_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        auto* digests = pointer<std::uint64_t>(digests_ptr);
        if (cuda_ != nullptr) {
            cuda_->run(&batch, digests, stream);
        } else {
            run_delta_decode(&batch, digests);
        }
        auto* out = pointer<std::int64_t>(outcomes_ptr);
        for (const DeltaDecodeOutcome outcome : batch.outcomes) {
            *out++ = static_cast<std::int64_t>(outcome);
        }
    }
    // Looking into records, then what the device says.
    std::vector<double> seconds() const {
        std::vector<double> found{index_s_};
        if (cuda_ != nullptr) {
            const std::vector<double> there = cuda_->seconds();
            found.insert(found.end(), there.begin(), there.end());
        }
        return found;
    }
    void close() {
        if (cuda_ != nullptr) cuda_->close();
    }

  private:
    std::unique_ptr<CudaDeltaDecoder> cuda_;
    double index_s_ = 0;
};

void bind_decoder(py::module_& module) {
    py::class_<DeltaDecoder>(module, "DeltaDecoder", plain_metaclass())
        .def(py::init<int>(), py::arg("device"))
        .def("run", &DeltaDecoder::run, py::arg("rows_ptr"), py::arg("inputs_ptr"),
             py::arg("num_rows"), py::arg("digests_ptr"), py::arg("outcomes_ptr"),
             py::arg("stream"), py::arg("num_threads"), py::call_guard<py::gil_scoped_release>())
        .def("seconds", &DeltaDecoder::seconds)
        .def("close", &DeltaDecoder::close, py::call_guard<py::gil_scoped_release>());
}

void bind_encoder(py::module_& module) {
    py::class_<DeltaEncoder>(module, "DeltaEncoder", plain_metaclass())
        .def(py::init<int, std::uint32_t>(), py::arg("device"), py::arg("capacity") = 288)
        .def("run", &DeltaEncoder::run, py::arg("rows_ptr"), py::arg("num_rows"),
             py::arg("digests_ptr"), py::arg("stream"), py::arg("sample_stream"),
             py::arg("num_threads"), py::call_guard<py::gil_scoped_release>())
        .def("outcomes", &DeltaEncoder::outcomes, py::arg("out_ptr"))
        .def("write", &DeltaEncoder::write, py::arg("payload_ptr"), py::arg("digests_ptr"),
             py::arg("num_threads"), py::call_guard<py::gil_scoped_release>())
        .def("seconds", &DeltaEncoder::seconds)
        .def("close", &DeltaEncoder::close, py::call_guard<py::gil_scoped_release>());
}

// kind, word_bytes, num_elements, digest.
using FormColumns = std::array<std::uint64_t, 4>;

DeltaTensorForm form_of(const FormColumns& columns) {
    const DeltaTensorForm form{static_cast<DeltaKind>(columns[0] & 0xFF),
                               static_cast<int>(columns[1]), static_cast<std::int64_t>(columns[2]),
                               columns[3]};
    if (form.num_elements > (std::int64_t{1} << 60)) {
        throw std::invalid_argument("num_elements is " + std::to_string(form.num_elements));
    }
    // What holds for one of its spans holds for all.
    validate_delta_place(
        {form.kind, 0, std::min(form.num_elements, kDeltaSpan), 0, form.word_bytes});
    return form;
}

std::int64_t dense_bytes(const py::buffer_info& info) {
    if (info.ndim != 1 || info.itemsize != 1 || (info.shape[0] > 1 && info.strides[0] != 1)) {
        throw std::invalid_argument("expected dense bytes");
    }
    return info.shape[0];
}

void bind_packed(py::module_& module) {
    module.def(
        "delta_pack",
        [](const FormColumns& columns, const py::bytes& records) {
            const DeltaTensorForm form = form_of(columns);
            const auto whole = static_cast<std::string_view>(records);
            std::string packed(whole.empty() ? 0 : whole.size() - 1, '\0');
            {
                const py::gil_scoped_release released;
                packed.resize(static_cast<std::size_t>(
                    delta_pack(form, reinterpret_cast<const unsigned char*>(whole.data()),
                               static_cast<std::int64_t>(whole.size()),
                               reinterpret_cast<unsigned char*>(packed.data()),
                               static_cast<std::int64_t>(packed.size()))));
            }
            return py::bytes(packed);
        },
        py::arg("form"), py::arg("records"));
    module.def(
        "delta_unpack",
        [](const FormColumns& columns, const py::buffer& packed, const py::buffer& records) {
            const py::buffer_info from = packed.request();
            const py::buffer_info to = records.request(true);
            const std::int64_t packed_bytes = dense_bytes(from);
            const std::int64_t records_bytes = dense_bytes(to);
            const DeltaTensorForm form = form_of(columns);
            const py::gil_scoped_release released;
            delta_unpack(form, static_cast<const unsigned char*>(from.ptr), packed_bytes,
                         static_cast<unsigned char*>(to.ptr), records_bytes);
        },
        py::arg("form"), py::arg("packed"), py::arg("records"));
}

}  // namespace

void bind_delta(py::module_& module) {
    py::register_exception<DeltaError>(module, "DeltaError", PyExc_RuntimeError);
    bind_encoder(module);
    bind_decoder(module);
    bind_packed(module);
    module.attr("DELTA_BLOCK") = kDeltaBlock;
    module.attr("DELTA_SPAN") = kDeltaSpan;
    module.def("delta_kernel", &delta_kernel_name);
    module.def("delta_use_portable", &delta_use_portable, py::arg("is_portable"));
    module.def(
        "delta_record_capacity",
        [](const PlaceColumns& columns) { return delta_record_capacity(place_of(columns)); },
        py::arg("place"));
    module.def("delta_encode", &encode, py::arg("place"), py::arg("old_ptr"), py::arg("new_ptr"),
               py::arg("is_absolute"), py::arg("is_dense"), py::arg("record_ptr"),
               py::arg("dense_ptr"), py::arg("digests_ptr"));
    module.def("delta_decode", &decode, py::arg("place"), py::arg("record_ptr"),
               py::arg("record_bytes"), py::arg("dense_ptr"), py::arg("num_dense"),
               py::arg("old_ptr"), py::arg("are_digests_known"), py::arg("positions_ptr"),
               py::arg("values_ptr"), py::arg("capacity"), py::arg("digests_ptr"));
    module.def(
        "delta_block_digests",
        [](const PlaceColumns& columns, std::uintptr_t data_ptr, std::uintptr_t digests_ptr) {
            check_pointers({data_ptr, digests_ptr});
            const DeltaPlace place = place_of(columns);
            const py::gil_scoped_release released;
            delta_block_digests(place, pointer<const unsigned char>(data_ptr),
                                pointer<std::uint64_t>(digests_ptr));
        },
        py::arg("place"), py::arg("data_ptr"), py::arg("digests_ptr"));
    module.def(
        "delta_checksum",
        [](std::uintptr_t record_ptr, std::int64_t num_bytes) {
            check_pointers({record_ptr});
            if (num_bytes < static_cast<std::int64_t>(sizeof(DeltaHeader)) || num_bytes % 8 != 0) {
                throw std::invalid_argument("a record of " + std::to_string(num_bytes) + " bytes");
            }
            const py::gil_scoped_release released;
            return delta_checksum(pointer<const unsigned char>(record_ptr), num_bytes);
        },
        py::arg("record_ptr"), py::arg("num_bytes"));
    module.def(
        "delta_scatter",
        [](int element_bytes, std::uintptr_t target_ptr, std::int64_t num_elements,
           std::uintptr_t positions_ptr, std::uintptr_t values_ptr, std::int64_t count) {
            check_pointers({target_ptr, positions_ptr, values_ptr});
            check_element(element_bytes);
            const py::gil_scoped_release released;
            delta_scatter(element_bytes, pointer<unsigned char>(target_ptr), num_elements,
                          pointer<const std::uint32_t>(positions_ptr),
                          pointer<const unsigned char>(values_ptr), count);
        },
        py::arg("element_bytes"), py::arg("target_ptr"), py::arg("num_elements"),
        py::arg("positions_ptr"), py::arg("values_ptr"), py::arg("count"));
    module.def(
        "delta_exchange",
        [](int element_bytes, std::uintptr_t target_ptr, std::int64_t num_elements,
           std::uintptr_t positions_ptr, std::uintptr_t values_ptr, std::uintptr_t former_ptr,
           std::int64_t count) {
            check_pointers({target_ptr, positions_ptr, values_ptr, former_ptr});
            check_element(element_bytes);
            const py::gil_scoped_release released;
            delta_exchange(element_bytes, pointer<unsigned char>(target_ptr), num_elements,
                           pointer<const std::uint32_t>(positions_ptr),
                           pointer<const unsigned char>(values_ptr),
                           pointer<unsigned char>(former_ptr), count);
        },
        py::arg("element_bytes"), py::arg("target_ptr"), py::arg("num_elements"),
        py::arg("positions_ptr"), py::arg("values_ptr"), py::arg("former_ptr"), py::arg("count"));
    module.def(
        "delta_count_different",
        [](int element_bytes, std::uintptr_t target_ptr, std::int64_t num_elements,
           std::uintptr_t positions_ptr, std::uintptr_t values_ptr, std::int64_t count) {
            check_pointers({target_ptr, positions_ptr, values_ptr});
            check_element(element_bytes);
            const py::gil_scoped_release released;
            return delta_count_different(element_bytes, pointer<const unsigned char>(target_ptr),
                                         num_elements, pointer<const std::uint32_t>(positions_ptr),
                                         pointer<const unsigned char>(values_ptr), count);
        },
        py::arg("element_bytes"), py::arg("target_ptr"), py::arg("num_elements"),
        py::arg("positions_ptr"), py::arg("values_ptr"), py::arg("count"));
}

}  // namespace weightsync::bindings
