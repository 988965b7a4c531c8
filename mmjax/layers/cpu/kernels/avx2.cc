// AVX2 with FMA (Haswell, Zen and later).
#include "attention.h"
#include "avx2.h"
#include "avx2_groups.h"
#include "rows.h"

namespace mmjax {

const Products kAvx2 = {multiply_few<Float32Lanes>,
                        multiply_few<Bfloat16Lanes>,
                        multiply_few<Int8Lanes>,
                        multiply_few<WithInt8Weights<GivenFloats>>,
                        multiply_few<WithInt8Weights<WidenedFloats>>,
                        attend_chunk<float>,
                        attend_chunk<bf16>,
                        norm_rows<float>,
                        norm_rows<bf16>,
                        rotate_rows<float>,
                        rotate_rows<bf16>,
                        kGroups<Uint4Codes>,
                        kGroups<Uint8Codes>,
                        kGroups<Float8Codes>,
                        "avx2"};

}  // namespace mmjax
